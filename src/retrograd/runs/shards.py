"""A shard: a safetensors file of many tensors, named by moment and site, with notes on those stored in another form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from retrograd.files import make_storable, write_whole
from retrograd.foreign.sums import check_sum, sum_tensor
from retrograd.foreign.text import check_kinds, expect_file, parse_object
from retrograd.history.sink import Moment
from retrograd.runs.encoding import INDICES, decode_tensor

NOTES = "retrograd"
"""Key of the metadata of a shard under which the notes on its tensors stand, as JSON."""


SUMS = "crc32"
"""Key of a note under which the sums over a tensor's entries stand."""

_KINDS = {
    "kind": str,
    "dtype": str,
    "shape": list[int],
    "sparse": list[int],
    "scale": float,
    SUMS: list[int],
}


def print_name(moment: Moment, site: str) -> str:
    """The name of a tensor in a shard: ``step/micro/backward/phase/site``."""
    return f"{moment.step}/{moment.micro}/{moment.backward}/{moment.phase}/{make_storable(site)}"


def parse_name(name: str) -> tuple[Moment, str]:
    """Moment and site of a tensor in a shard.

    Raises:
        ValueError: for a name of another form.
    """
    step, micro, backward, phase, site = name.removesuffix(INDICES).split("/", 4)
    return Moment(int(step), int(micro), int(backward), phase), site  # type: ignore[arg-type]


def read_shard(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All entries of a shard, and the notes on them."""
    with safetensors.safe_open(expect_file(path), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, _read_notes(file)  # noqa: SIM118


def list_tensors(path: Path) -> dict[str, dict[str, Any]]:
    """The names of a shard's tensors, each with its note; reads the header alone."""
    with safetensors.safe_open(expect_file(path), "pt") as file:
        notes = _read_notes(file)
        return {name: notes.get(name, {}) for name in file.keys() if not name.endswith(INDICES)}  # noqa: SIM118


def read_tensor(path: Path, name: str, note: dict[str, Any]) -> torch.Tensor:
    """One tensor of a shard, as it was.

    Raises:
        ValueError: it is not what was written.
    """
    with safetensors.safe_open(expect_file(path), "pt") as file:
        names = [name, name + INDICES] if "sparse" in note else [name]
        entries = {each: file.get_tensor(each) for each in names}
    for each, told in zip(names, note.get(SUMS, ()), strict=False):  # the first version wrote none
        check_sum(entries[each], told, each)
    return decode_tensor(entries, name, note)


def write_shard(path: Path, entries: dict[str, torch.Tensor], notes: dict[str, Any]) -> None:
    """Write encoded tensors, and the notes on them by name, to which sums over their entries are added."""
    notes = {name: {**notes.get(name, {}), SUMS: _sum(entries, name)} for name in entries if not name.endswith(INDICES)}
    data = safetensors.torch.save(entries, {NOTES: json.dumps(notes)})
    with write_whole(path) as file:
        file.write(data)


def _sum(entries: dict[str, torch.Tensor], name: str) -> list[int]:
    return [sum_tensor(entries[each]) for each in (name, name + INDICES) if each in entries]


def _read_notes(file: Any) -> dict[str, Any]:
    notes = parse_object((file.metadata() or {}).get(NOTES, "{}"))
    for name, note in notes.items():
        check_kinds({name: note}, {name: dict[str, Any]})
        check_kinds(note, _KINDS)
    return notes
