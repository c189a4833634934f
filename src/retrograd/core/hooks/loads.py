"""States that a program reads and loads: files of ``torch.load``, and what ``load_state_dict`` does with them.

All is noted from the start of the process on, before there is a recording. Nothing that is loaded is held: what is
remembered are names, numbers and weak references, and of values sums of some bit patterns, on their own device.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from retrograd.core.hooks.discovery import constructed_optimizers
from retrograd.core.hooks.dispatch import carry_out_unseen, without_graph
from retrograd.core.hooks.engine import is_tracing, is_transformed, uncompiled, uncompiled_itself
from retrograd.core.hooks.listeners import Patch, Undo, replace, wrap_method
from retrograd.core.hooks.optimizer import held_by
from retrograd.core.hooks.torch_calls import describe_frame, program_frame
from retrograd.core.identities import IdentityDict

_MOST_NOTES = 256
_OFTEN = 20
"""Loads of one line and target that are noted; of later ones those at powers of two."""
_MOST_TENSORS, _MOST_ELEMENTS = 64, 4096
"""Of values: tensors that are read, and elements of each."""
_MOST_FILES, _MOST_REMEMBERED, _MOST_KNOWN = 8, 1 << 14, 2
"""Files whose keys are remembered; tensors of files, and of a state that was taken."""
_DEPTH, _MOST_ITEMS = 4, 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Sums = dict[torch.device, Tensor]
Shapes = dict[str, torch.Size]


@dataclass(slots=True)
class ReadNote:
    """A file that was read; fields are those of the fact :class:`~retrograd.core.history.weights_facts.StateRead`."""

    name: str
    line: str
    number: int
    tensors: int = 0
    parts: list[dict[str, Any]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class LoadNote:
    """A state that was loaded.

    Attributes:
        target: what has taken it; weak.
        fields: those of the fact :class:`~retrograd.core.history.weights_facts.Load` that are known.
        before, after: sums of some of its values; None where they were not read.
    """

    target: weakref.ref[Any]
    fields: dict[str, Any]
    before: Sums | None = None
    after: Sums | None = None


class _Here(threading.local):
    depth = 0


_here = _Here()


class LoadLog:
    """What was read and loaded in this process.

    Attributes:
        notes: the last of them, with the number of each.
        count: how many there were.
        step: the step that it is, as far as a recording has told.
        loaded: numbers of the files of which tensors have been loaded.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.notes: deque[tuple[int, ReadNote | LoadNote]] = deque(maxlen=_MOST_NOTES)
        self.count = 0
        self.step = -1
        self._files = 0
        self._keys: deque[tuple[int, int, Shapes]] = deque(maxlen=_MOST_FILES)
        self.loaded: set[int] = set()
        self._tensors: IdentityDict[Tensor, int] = IdentityDict()
        self._taken: IdentityDict[Tensor, tuple[int, str]] = IdentityDict()
        self._times: Counter[tuple[str, int]] = Counter()

    def since(self, number: int) -> list[ReadNote | LoadNote]:
        """The notes behind the first so many."""
        return [note for at, note in self.notes if at > number]

    def add(self, note: ReadNote | LoadNote) -> None:
        """Keep a note."""
        self.count += 1
        self.notes.append((self.count, note))

    # ---- files ----

    def add_file(self, file: Any, content: Any, line: str) -> None:
        """A file was read."""
        name = Path(file).name if isinstance(file, str | os.PathLike) else ""
        note = ReadNote(name, line, self._files + 1)
        self._search(note, "", content, 0)
        if note.parts:
            self._files += 1
            self.add(note)

    def _search(self, note: ReadNote, path: str, found: Any, depth: int) -> None:
        part = _describe_part(found)
        if part is not None:
            note.parts.append({"path": path, **part})
            if part["kind"] == "weights":
                note.tensors += int(part["tensors"])
                shapes = {str(key): each.shape for key, each in _tensors(found)}
                self._keys.append((note.number, self.step, shapes))
                self._remember(note.number, (each for _, each in _tensors(found)))
            elif part.get("step", 0) > 1:
                note.counters[f"{path}.step".strip(".")] = part["step"]
        elif type(found) is int:
            note.counters[path] = found
        elif depth < _DEPTH:
            for key, each in _items_of(found):
                self._search(note, f"{path}.{key}".strip("."), each, depth + 1)

    def _remember(self, number: int, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if len(self._tensors) < _MOST_REMEMBERED:
                self._tensors[tensor] = number

    # ---- states ----

    def take(self, state: Any, line: str) -> None:
        """The program has taken the state of a module."""
        for _, tensor in itertools.islice(_tensors(state), _MOST_KNOWN):  # the program may put them into another dict
            self._taken[tensor] = self.step, line

    def count_load(self, line: str, target: object) -> int:
        """Count a load; returns how many there were, 0 where it is not to be noted."""
        if len(self._times) > 1024:
            self._times.clear()
        times = self._times[line, id(target)] = self._times[line, id(target)] + 1
        return times if times <= _OFTEN or times & (times - 1) == 0 else 0

    def describe_source(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Where a state is from."""
        tensors = [each for _, each in _tensors(state)]
        taken, taken_line = next((self._taken[each] for each in tensors if each in self._taken), (-1, ""))
        files = Counter(self._tensors[each] for each in tensors if each in self._tensors)
        return {
            "taken": taken,
            "taken_line": taken_line,
            "written": _count_writes([each for each in tensors if each.is_floating_point()]),
            "file": files.most_common(1)[0][0] if files else 0,
        }

    def match_files(self, own: Shapes) -> tuple[str, int, int]:
        """The file of which keys would match but for a prefix: prefix, how many, and its number.

        It was read in this step, nothing of it has been loaded, and none of its keys is the module's.
        """
        found = [
            (*find_prefix(keys, own), number)
            for number, step, keys in self._keys
            if step == self.step and number not in self.loaded and not keys.keys() & own.keys()
        ]
        return max(found, key=lambda each: each[1], default=("", 0, 0))


log = LoadLog()


def _items_of(found: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(found, Mapping) and len(found) <= _MOST_ITEMS:
        yield from found.items()
    elif isinstance(found, list | tuple) and len(found) <= _MOST_ITEMS:
        yield from enumerate(found)


def _tensors(state: Mapping[Any, Any]) -> Iterator[tuple[Any, Tensor]]:
    return ((key, each) for key, each in state.items() if isinstance(each, Tensor))


def _count_writes(tensors: list[Tensor]) -> int:
    """How many operations have written into the tensor that most have; −1 where an optimizer updates one of them."""
    updated = {each.data_ptr() for optimizer in constructed_optimizers() for each in held_by(optimizer)}
    if any(each.data_ptr() in updated for each in tensors):
        return -1
    return max((each._version for each in tensors if not each.is_inference()), default=-1)


def _describe_part(found: Any) -> dict[str, Any] | None:
    """What a part of a file is; None where it is none of those that are known."""
    if not isinstance(found, Mapping):
        return None
    if {"state", "param_groups"} <= found.keys():
        return _describe_optimizer(found)
    if "last_epoch" in found and isinstance(found["last_epoch"], int):
        return {"kind": "scheduler", "step": found["last_epoch"], "lr": _numbers(found.get("_last_lr"))}
    tensors = sum(isinstance(each, Tensor) for each in found.values())
    if tensors and 2 * tensors > len(found) and all(isinstance(key, str) for key in found):
        return {"kind": "weights", "tensors": tensors}
    return None


def _describe_optimizer(found: Mapping[str, Any]) -> dict[str, Any]:
    states = [each for each in found["state"].values() if isinstance(each, Mapping)]
    groups = [
        {name: value for name, value in group.items() if isinstance(value, bool | int | float | str)}
        | {"parameters": len(group.get("params", ()))}
        for group in found["param_groups"]
    ]
    keys = sorted(map(str, states[0])) if states else []
    return {"kind": "optimizer", "groups": groups, "state": len(states), "keys": keys, "step": _count_of(states)}


def _count_of(states: Iterable[Mapping[Any, Any]]) -> int:
    counts = [each["step"] for each in states if "step" in each][:1]
    is_here = all(not isinstance(each, Tensor) or each.device.type == "cpu" for each in counts)
    return int(counts[0]) if counts and is_here else -1


def _numbers(found: Any) -> list[float]:
    return [float(each) for each in found] if isinstance(found, list | tuple) else []


# ---- keys ----


def find_prefix(given: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[str, int]:
    """The prefix of most of the given keys, or with ``+`` of the own ones, without which they match, and how many do.

    Args:
        given: shapes by key.
        own: the same of the module.
    """
    found: Counter[str] = Counter()
    for sign, longer, shorter in (("", given, own), ("+", own, given)):
        for key, shape in longer.items():
            at = key.find(".") + 1
            while at:
                if shorter.get(key[at:]) == shape:
                    found[sign + key[:at]] += 1
                at = key.find(".", at) + 1
    return found.most_common(1)[0] if found else ("", 0)


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    named = (nn.Module.named_parameters, nn.Module.named_buffers)
    return {name: each for walk in named for name, each in walk(module, remove_duplicate=False)}


def _shapes_of(tensors: Iterable[tuple[Any, Tensor]]) -> Shapes:
    return {str(key): each.shape for key, each in tensors}


# ---- values ----


def sum_some_bits(tensors: Iterable[Tensor]) -> Sums:
    """Sums of bit patterns of some of the floating elements, without waiting for the device."""
    plain = [each for each in tensors if is_plain(each)]
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in plain[:: max(1, len(plain) // _MOST_TENSORS)]:
        sums.setdefault(tensor.device, []).append(carry_out_unseen(functools.partial(_sum_bits, tensor)))
    return {device: carry_out_unseen(functools.partial(torch.stack, each)) for device, each in sums.items()}


def is_plain(tensor: Tensor) -> bool:
    """Return whether the bits of a tensor can be read."""
    is_strided = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    is_real = tensor.is_floating_point() and not tensor.is_meta and tensor.numel() > 0
    return is_strided and is_real and not is_transformed(tensor) and tensor.is_contiguous()


def _sum_bits(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        values = without_graph(tensor).view(-1)[:_MOST_ELEMENTS]
        return values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)


def are_equal(one: Sums | None, other: Sums | None) -> bool | None:
    """Return whether sums are the same; None where there are none. It waits for the device."""
    if not one or not other or one.keys() != other.keys():
        return None
    return all(torch.equal(each, other[device]) for device, each in one.items())


# ---- what stands in torch ----


@uncompiled
def _line() -> str:
    return describe_frame(program_frame(sys._getframe(2)))


def _is_quiet() -> bool:
    return _here.depth > 0 or is_tracing()


@uncompiled_itself
def _load_module(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    note = None if _is_quiet() else _begin_load(module, args, kwargs)
    _here.depth += 1
    try:
        result = original(module, *args, **kwargs)
    finally:
        _here.depth -= 1
    if note is not None:
        _end_load(note, module, args, kwargs, result)
    return result


def _state_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("state_dict")


@uncompiled
def _begin_load(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LoadNote | None:
    try:
        line, state = describe_frame(program_frame(sys._getframe(2))), _state_of(args, kwargs)
        times = log.count_load(line, module)
        if not times or not isinstance(state, Mapping):
            return None
        own = _own_tensors(module)
        same = sum(each.data_ptr() == own[key].data_ptr() != 0 for key, each in _tensors(state) if key in own)
        strict = args[1] if len(args) > 1 else kwargs.get("strict", True)
        fields = {
            "type": type(module).__name__, "line": line, "times": times, "strict": bool(strict), "same": same,
            **log.describe_source(state),
        }  # fmt: skip
        return LoadNote(weakref.ref(module), fields, sum_some_bits(own.values()))
    except Exception:  # what is odd is not noted: loading goes on
        return None


@uncompiled
def _end_load(note: LoadNote, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
    try:
        state, own = _state_of(args, kwargs), _own_tensors(module)
        missing, unexpected = (list(getattr(result, name, ())) for name in ("missing_keys", "unexpected_keys"))
        copied = len(state) - len(unexpected)
        source = note.fields["file"]
        prefix, matching, file = "", 0, source
        if unexpected and missing:
            given = {key: state[key].shape for key in unexpected if isinstance(state.get(key), Tensor)}
            prefix, matching = find_prefix(given, {key: own[key].shape for key in missing if key in own})
        elif note.fields["same"] == copied:
            prefix, matching, file = log.match_files(_shapes_of(own.items()))
        note.fields |= {
            "value": float(copied), "prefix": prefix, "matching": matching, "file": file,
            "missing": len(missing), "unexpected": len(unexpected),
            "missing_keys": tuple(missing[:3]), "unexpected_keys": tuple(unexpected[:3]),
        }  # fmt: skip
        note.after = sum_some_bits(own.values())
        log.add(note)
        if copied:
            log.loaded.add(source)
    except Exception:  # as above
        return


@uncompiled_itself
def _take_state(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs.get("destination") is not None or _is_quiet():
        return original(module, *args, **kwargs)
    _here.depth += 1
    try:
        result = original(module, *args, **kwargs)
    finally:
        _here.depth -= 1
    _note_taken(result, _line())
    return result


@uncompiled
def _note_taken(state: Any, line: str) -> None:
    try:
        if isinstance(state, Mapping):
            log.take(state, line)
    except Exception:  # as above
        return


@uncompiled_itself
def _load_other(original: Callable[..., Any], target: Any, *args: Any, **kwargs: Any) -> Any:
    _here.depth += 1
    try:
        result = original(target, *args, **kwargs)
    finally:
        _here.depth -= 1
    if not _is_quiet():
        _note_other(target, _line())
    return result


@uncompiled
def _note_other(target: Any, line: str) -> None:
    try:
        _add_other(target, line)
    except Exception:  # as above
        return


def _add_other(target: Any, line: str) -> None:
    times = log.count_load(line, target)
    if not times:
        return
    fields: dict[str, Any] = {"type": type(target).__name__, "line": line, "times": times}
    if isinstance(target, Optimizer):
        states = [each for each in target.state.values() if isinstance(each, Mapping)]
        rates = tuple(float(each["lr"]) for each in target.param_groups if isinstance(each.get("lr"), int | float))
        fields |= {"of": "optimizer", "value": float(len(states)), "lr": rates, "count": _count_of(states)}
    else:
        fields |= {"of": "scheduler", "count": int(getattr(target, "last_epoch", -1))}
    log.add(LoadNote(weakref.ref(target), fields))


def _wrap_reading() -> Undo:
    original = torch.load

    @functools.wraps(original)
    @uncompiled_itself
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        content = original(f, *args, **kwargs)
        if not _is_quiet():
            _note_file(f, content)
        return content

    return replace(torch, "load", load)


@uncompiled
def _note_file(file: Any, content: Any) -> None:
    try:
        log.add_file(file, content, describe_frame(program_frame(sys._getframe(2))))
    except Exception:  # as above
        return


def _wrap_loads() -> list[Undo]:
    own = [each for each in vars(lr_scheduler).values() if isinstance(each, type) and issubclass(each, LRScheduler)]
    return [
        log.clear,
        wrap_method(nn.Module, "load_state_dict", _load_module),
        wrap_method(nn.Module, "state_dict", _take_state),
        wrap_method(Optimizer, "load_state_dict", _load_other),
        *(wrap_method(each, "load_state_dict", _load_other) for each in own if "load_state_dict" in vars(each)),
        _wrap_reading(),
    ]


load_watch = Patch(_wrap_loads)
"""While somebody holds it, states that are read and loaded are noted in ``log``."""
