"""The settings of a run, as one flat mapping: what somebody would change to train it otherwise."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

Setting = bool | int | float | str

_UNUSUAL = ("foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay")
"""Arguments of optimizers that are told only where they are set."""


_OF_CYCLES = ("lr", "initial_lr", "min_lr", "base_lr", "base_momentum", "max_momentum")


def read_settings(manifest: Mapping[str, Any]) -> dict[str, Setting]:
    """What a run was started with, from its manifest alone: cheap enough for every run of a folder.

    Keys, as far as they are known: ``script`` (file name, or ``-m module``), ``argv`` (what follows it, as typed),
    each option of it by its name as typed (``--lr``; a switch is True), ``optimizer`` (class; of several all of them)
    and its arguments by their own names (``lr``, ``weight_decay``, ``betas`` …; with several optimizers
    ``SGD_2.lr``; of groups that differ all values, comma-separated), ``batch`` (first dimension of the first input in
    the first training step), ``parameters`` (of the models that optimizers train, each tensor once), ``seed``,
    ``processes``, ``schedule``, ``commit``, ``changed`` (tracked files differ from it), ``torch``, ``python``,
    ``host``.

    Args:
        manifest: ``history.manifest``, or what :func:`retrograd.core.runs.manifest.read_manifest` gives.

    Returns:
        Numbers, texts and booleans, all plain; keys that are not known are missing.
    """
    found = dict(_read_command(manifest.get("command")))
    found |= _read_optimizers(manifest.get("optimizers"))
    for name in ("batch", "seed", "processes", "schedule", "host"):
        found |= _pick(name, manifest.get(name))
    found |= _pick("parameters", manifest.get("parameters")) or _count_parameters(manifest.get("model"))
    git, versions = manifest.get("git"), manifest.get("versions")
    if isinstance(git, Mapping):
        found |= _pick("commit", git.get("commit")) | _pick("changed", git.get("dirty"))
    if isinstance(versions, Mapping):
        found |= _pick("torch", versions.get("torch")) | _pick("python", versions.get("python"))
    return found


def _pick(name: str, value: Any) -> dict[str, Setting]:
    return {name: value} if isinstance(value, Setting) and value != "" else {}


def _count_parameters(model: Any) -> dict[str, Setting]:
    rows = [row for row in model if isinstance(row, Mapping)] if isinstance(model, list) else []
    counts = [row.get("parameters") for row in rows]
    known = [count for count in counts if isinstance(count, int)]
    return {"parameters": sum(known)} if known else {}


# ---- the command ----


def _read_command(command: Any) -> Iterator[tuple[str, Setting]]:
    if not isinstance(command, list | str):
        return
    words = [str(word) for word in command] if isinstance(command, list) else str(command).split()
    script, arguments = _split(words)
    if script:
        yield "script", script
    if arguments:
        yield "argv", " ".join(arguments)
    yield from _read_options(arguments)


_INTERPRETER = re.compile(r"(python|pypy)[\d.]*(\.exe)?$", re.IGNORECASE)
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def _split(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The script, without the interpreter or the launcher and its options, and what follows it."""
    if words and not _INTERPRETER.match(PurePath(words[0]).name) and words[0] not in ("-m", "-c"):
        place = next((number for number, word in enumerate(words) if word.endswith(".py")), 0)
        return PurePath(words[place]).name, words[place + 1 :]
    place = 0 if words[:1] in (["-m"], ["-c"]) else 1
    while place < len(words):
        word = words[place]
        if word in ("-m", "-c"):
            return (
                (f"-m {words[place + 1]}" if word == "-m" else "-c", words[place + 2 :])
                if words[place + 1 :]
                else ("", ())
            )
        if not word.startswith("-"):
            return PurePath(word).name, words[place + 1 :]
        place += 2 if word in _WITH_VALUE else 1
    return "", ()


def _read_options(words: Sequence[str]) -> Iterator[tuple[str, Setting]]:
    """Options by name; also those of Hydra and OmegaConf, ``optimizer.lr=0.1``."""
    place = 0
    while place < len(words):
        name, equals, value = words[place].partition("=")
        place += 1
        if not equals and name.startswith("-") and not _is_number(name):
            value = words[place] if place < len(words) and _is_value(words[place]) else ""
            place += bool(value)
            yield name, _read(value) if value else True
        elif equals:
            yield name, _read(value)


def _is_value(word: str) -> bool:
    return not word.startswith("-") or _is_number(word)


def _is_number(word: str) -> bool:
    return not isinstance(_read(word), str)


def _read(word: str) -> Setting:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


# ---- optimizers ----


def _read_optimizers(optimizers: Any) -> dict[str, Setting]:
    listed = [each for each in optimizers if isinstance(each, Mapping)] if isinstance(optimizers, list) else []
    found: dict[str, Setting] = {}
    if listed:
        found["optimizer"] = ", ".join(str(each.get("type", "")) for each in listed)
    for each in listed:
        front = f"{each.get('name', '')}." if len(listed) > 1 else ""
        given = each.get("groups")
        groups = (
            [_drop_scheduled(group) for group in given if isinstance(group, Mapping)] if isinstance(given, list) else []
        )
        for name in dict.fromkeys(name for group in groups for name in group):
            values = list(dict.fromkeys(_tell(group.get(name)) for group in groups))
            if name not in _UNUSUAL or values not in (["null"], ["false"]):
                found[f"{front}{name}"] = _untell(values)
    return found


def _drop_scheduled(group: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a group without what a schedule has put there: its first rate is not what somebody chose.

    ``lr`` is what the optimizer was given; a cycle (``OneCycleLR``, ``CyclicLR``) has ``max_lr`` in its place.
    """
    if "max_lr" in group:
        kept = {name: value for name, value in group.items() if name not in _OF_CYCLES}
        cycled = f"{group.get('base_momentum')} … {group.get('max_momentum')}"
        if "base_momentum" in group and isinstance(kept.get("betas"), list | tuple):
            return kept | {"betas": [cycled, *kept["betas"][1:]]}
        return kept | {"momentum": cycled} if "base_momentum" in group else kept
    if "initial_lr" in group:
        return {name: value for name, value in group.items() if name != "initial_lr"} | {"lr": group["initial_lr"]}
    return dict(group)


def _tell(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


_AS_TUPLE = str.maketrans("[]", "()", '"')


def _untell(values: Sequence[str]) -> Setting:
    """A value alone as it is; several, or a list, as text."""
    if len(values) > 1:
        return ", ".join(values)
    value = json.loads(values[0])
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, Setting) else values[0].translate(_AS_TUPLE)
