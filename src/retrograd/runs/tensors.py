"""Tensor files: safetensors shards of many tensors each, within a budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from retrograd.history.kept import is_overwritten
from retrograd.history.sink import Event, KeptTensor, Moment
from retrograd.runs.encoding import INDICES, UnstorableTensorError, decode_tensor, encode_tensor
from retrograd.runs.files import remove_unfinished, write_whole
from retrograd.runs.layout import list_shards, shard_name

NOTES = "retrograd"
"""Key of the metadata of a shard under which the notes on its tensors stand, as JSON."""

MAX_SHARD_BYTES = 64 << 20
_ENTRY_BYTES = 200
"""More than an entry needs in a header besides its name, and a header besides its entries."""


@dataclass(slots=True)
class Copy:
    """A copy of a kept tensor that waits until nobody can have changed the original while it was made."""

    kept: KeptTensor
    name: str
    entries: dict[str, torch.Tensor]
    note: dict[str, Any]
    size: int
    added: int


class ShardFolder:
    """The tensor files of one rank.

    Args:
        folder: made with the first shard.
        budget: bytes of all files; never passed.
        count_added: tells how much the training thread has added so far, which shows that it goes on.

    Attributes:
        bytes: what the files take.
        dropped: tensors for which there was no room.
        lost: tensors that could not be written.
        news: what happened, as events; whoever takes them clears the list.
    """

    def __init__(self, folder: Path, budget: int, count_added: Callable[[], int]) -> None:
        self.folder = folder
        self._count_added = count_added
        self.budget = budget
        self.dropped = 0
        self.lost = 0
        self.news: list[Event] = []
        shards = list_shards(folder)
        remove_unfinished(folder)
        self.bytes = sum(path.stat().st_size for _, path in shards)
        self._next = shards[-1][0] + 1 if shards else 0
        self._copies: list[Copy] = []
        self._waiting_bytes = 0
        self._said: set[str] = set()

    @property
    def is_waiting(self) -> bool:
        """Whether copies wait to be confirmed."""
        return bool(self._copies)

    def copy(self, kept: KeptTensor) -> None:
        """Copy a tensor, unless it has changed since it was kept, or does not fit; then an event says so."""
        name = print_name(kept.moment, kept.site)
        if is_overwritten(kept):
            self._report_overwritten(kept)
            return
        try:
            entries, note = encode_tensor(name, kept.tensor)
        except (UnstorableTensorError, RuntimeError, NotImplementedError) as error:
            self.news.append(Event(kept.moment, "dropped", kept.site, text=str(error).partition("\n")[0]))
            return
        if kept.scale != 1.0:
            note["scale"] = kept.scale
        size = _bound_size(name, entries, note)
        if self.bytes + self._waiting_bytes + size > self.budget:
            self._drop(kept)
        else:
            self._copies.append(Copy(kept, name, entries, note, size, self._count_added()))
            self._waiting_bytes += size

    def write(self, *, is_paused: bool) -> None:
        """Write the copies whose originals cannot have been changing while they were made.

        An operation that changes a tensor in place counts its version up only when it is done. So a copy is
        trusted when the training thread has been heard of since, and the version still stands.

        Args:
            is_paused: the training thread is waiting for this, so it changes nothing.

        Raises:
            OSError: if a shard cannot be written; its tensors are lost.
        """
        added = self._count_added()
        trusted = [copy for copy in self._copies if is_paused or copy.added < added]
        self._copies = [] if is_paused else [copy for copy in self._copies if copy.added >= added]
        self._waiting_bytes = sum(copy.size for copy in self._copies)
        unchanged = [copy for copy in trusted if not is_overwritten(copy.kept)]
        for copy in trusted:
            if copy.kept.overwritten:
                self._report_overwritten(copy.kept)
        shards = list(_pack(unchanged))
        while shards:
            try:
                self._write_shard(shards[0])
            except OSError:
                self.lost += sum(len(shard) for shard in shards)
                raise
            del shards[0]

    def cut(self, first_step: int) -> None:
        """Remove all tensors of this step and later ones."""
        for _, path in list_shards(self.folder):
            entries, notes = read_shard(path)
            kept = {name: entry for name, entry in entries.items() if parse_name(name)[0].step < first_step}
            if len(kept) == len(entries):
                continue
            self.bytes -= path.stat().st_size
            if kept:
                _write_entries(path, kept, {name: note for name, note in notes.items() if name in kept})
                self.bytes += path.stat().st_size
            else:
                path.unlink()

    def _write_shard(self, shard: list[Copy]) -> None:
        entries = {name: entry for copy in shard for name, entry in copy.entries.items()}
        notes = {copy.name: copy.note for copy in shard if copy.note}
        self.folder.mkdir(exist_ok=True)
        path = self.folder / shard_name(self._next)
        _write_entries(path, entries, notes)
        self._next += 1
        self.bytes += path.stat().st_size

    def _drop(self, kept: KeptTensor) -> None:
        self.dropped += 1
        if kept.site not in self._said:
            self._said.add(kept.site)
            text = f"no room in the budget of {self.budget:,} bytes for tensors, from this one on"
            self.news.append(Event(kept.moment, "dropped", kept.site, text=text))

    def _report_overwritten(self, kept: KeptTensor) -> None:
        text = "changed in place before it was written"
        self.news.append(Event(kept.moment, "overwritten", kept.site, text=text))


def print_name(moment: Moment, site: str) -> str:
    """The name of a tensor in a shard: ``step/micro/backward/phase/site``."""
    return f"{moment.step}/{moment.micro}/{moment.backward}/{moment.phase}/{site}"


def parse_name(name: str) -> tuple[Moment, str]:
    """Moment and site of a tensor in a shard.

    Raises:
        ValueError: for a name of another form.
    """
    step, micro, backward, phase, site = name.removesuffix(INDICES).split("/", 4)
    return Moment(int(step), int(micro), int(backward), phase), site  # type: ignore[arg-type]


def read_shard(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All entries of a shard, and the notes on them."""
    with safetensors.safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, _read_notes(file)  # noqa: SIM118


def list_tensors(path: Path) -> dict[str, dict[str, Any]]:
    """The names of a shard's tensors, each with its note; reads the header alone."""
    with safetensors.safe_open(path, "pt") as file:
        notes = _read_notes(file)
        return {name: notes.get(name, {}) for name in file.keys() if not name.endswith(INDICES)}  # noqa: SIM118


def read_tensor(path: Path, name: str, note: dict[str, Any]) -> torch.Tensor:
    """One tensor of a shard, as it was."""
    with safetensors.safe_open(path, "pt") as file:
        names = [name, name + INDICES] if "sparse" in note else [name]
        return decode_tensor({each: file.get_tensor(each) for each in names}, name, note)


def _write_entries(path: Path, entries: dict[str, torch.Tensor], notes: dict[str, Any]) -> None:
    data = safetensors.torch.save(entries, {NOTES: json.dumps(notes)})
    with write_whole(path) as file:
        file.write(data)


def _read_notes(file: Any) -> dict[str, Any]:
    notes = json.loads((file.metadata() or {}).get(NOTES, "{}"))
    return dict(notes)


def _bound_size(name: str, entries: dict[str, torch.Tensor], note: dict[str, Any]) -> int:
    """Bytes that a tensor will take in a file, at most: data, entries of the header, and its note, escaped twice."""
    data = sum(entry.numel() * entry.element_size() for entry in entries.values())
    name_bytes, note_bytes = len(json.dumps(name)), len(json.dumps(json.dumps(note)))
    return data + (len(entries) + 1) * (_ENTRY_BYTES + name_bytes) + name_bytes + 2 * note_bytes


def _pack(copies: list[Copy]) -> Iterator[list[Copy]]:
    """Copies a shard each: as many as fit, and no name twice."""
    shard: dict[str, Copy] = {}
    size = 0
    for copy in copies:
        if shard and (size + copy.size > MAX_SHARD_BYTES or copy.name in shard):
            yield list(shard.values())
            shard, size = {}, 0
        shard[copy.name] = copy
        size += copy.size
    if shard:
        yield list(shard.values())
