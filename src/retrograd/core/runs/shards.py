"""Shards: safetensors files of many tensors, named by moment and site, with notes on those stored in another form.

A process writes the tensors of its rank: only what is true, bit for bit, and never more than the budget.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from retrograd.core.addresses import is_remote
from retrograd.core.files import make_storable, refuse_link, remove_unfinished, write_whole
from retrograd.core.foreign.sums import check_sum, sum_tensor
from retrograd.core.foreign.text import check_kinds, expect_file, parse_object
from retrograd.core.history.kept import count_bytes, is_overwritten
from retrograd.core.history.sink import Event, KeptTensor, Moment
from retrograd.core.limits import LIMITS
from retrograd.core.runs.layout import list_shards, shard_name

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

_PLAIN = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
})  # fmt: skip
"""Dtypes that safetensors holds in every supported release."""

INDICES = "#indices"
"""Suffix of the second entry of a sparse tensor."""

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
        max_waiting: bytes of copies that may wait while files cannot be written.

    Attributes:
        bytes: what the files take.
        dropped: tensors for which there was no room.
        lost: tensors that could not be written, and for which there was no room to wait.
        news: what happened, as events; whoever takes them clears the list.
    """

    def __init__(self, folder: Path, budget: int, count_added: Callable[[], int], max_waiting: int = 256 << 20) -> None:
        self.folder = refuse_link(folder)
        self._max_waiting = max_waiting
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
        self._true: list[Copy] = []
        self._waiting_bytes = 0
        self._said: set[str] = set()

    def copy(self, kept: KeptTensor) -> None:
        """Copy a tensor, unless it has changed since it was kept, or does not fit; then an event says so."""
        if self._used + count_bytes(kept.tensor) > self.budget:
            self._drop(kept)
            return
        name = print_name(kept.moment, kept.site)
        try:
            if is_overwritten(kept):
                self._report_overwritten(kept)
                return
            with _on_own_stream(kept):
                entries, note = encode_tensor(name, kept.tensor)
        except (UnstorableTensorError, RuntimeError, NotImplementedError) as error:
            self.news.append(Event(kept.moment, "dropped", kept.site, text=str(error).partition("\n")[0]))
            return
        if kept.scale != 1.0:
            note["scale"] = kept.scale
        size = _bound_size(name, entries, note)
        if self._used + size > self.budget:
            self._drop(kept)
        else:
            self._copies.append(Copy(kept, name, entries, note, size, self._count_added()))
            self._waiting_bytes += size

    def write(self, *, is_paused: bool) -> None:
        """Write the copies whose originals cannot have been changing while they were made, and those left from before.

        An operation that changes a tensor in place counts its version up only when it is done. So a copy is
        trusted when the training thread has been heard of since, and the version still stands.

        Args:
            is_paused: the training thread is waiting for this, so it changes nothing.

        Raises:
            OSError: if a shard cannot be written; its tensors wait for the next time.
        """
        self._find_true(is_paused=is_paused)
        try:
            for shard in _pack(self._true):
                self._write_shard(shard)
                self._true = self._true[len(shard) :]
        except OSError:
            while sum(copy.size for copy in self._true) > self._max_waiting:
                self._true.pop()
                self.lost += 1
            raise
        finally:
            self._waiting_bytes = sum(copy.size for copy in (*self._copies, *self._true))

    def give_up(self) -> None:
        """Count all that still waits as lost."""
        self.lost += len(self._true)
        self._true = []

    def cut(self, first_step: int) -> None:
        """Remove all tensors of this step and later ones."""
        for _, path in list_shards(self.folder):
            entries, notes = read_shard(path)
            kept = {name: entry for name, entry in entries.items() if parse_name(name)[0].step < first_step}
            if len(kept) == len(entries):
                continue
            self.bytes -= path.stat().st_size
            if kept:
                write_shard(path, kept, {name: note for name, note in notes.items() if name in kept})
                self.bytes += path.stat().st_size
            else:
                path.unlink()

    def _find_true(self, *, is_paused: bool) -> None:
        added = self._count_added()
        trusted = [copy for copy in self._copies if is_paused or copy.added < added]
        self._copies = [] if is_paused else [copy for copy in self._copies if copy.added >= added]
        self._true += [copy for copy in trusted if not is_overwritten(copy.kept)]
        for copy in trusted:
            if copy.kept.overwritten:
                self._report_overwritten(copy.kept)

    @property
    def _used(self) -> int:
        return self.bytes + self._waiting_bytes

    def _write_shard(self, shard: list[Copy]) -> None:
        entries = {name: entry for copy in shard for name, entry in copy.entries.items()}
        notes = {copy.name: copy.note for copy in shard if copy.note}
        self.folder.mkdir(exist_ok=True)
        path = self.folder / shard_name(self._next)
        write_shard(path, entries, notes)
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
        if shard and (size + copy.size > LIMITS.shard_bytes or copy.name in shard):
            yield list(shard.values())
            shard, size = {}, 0
        shard[copy.name] = copy
        size += copy.size
    if shard:
        yield list(shard.values())


# ---- one file ----


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


def open_shard(path: Path) -> Any:
    """A shard to read from, as ``safetensors.safe_open`` gives it.

    Raises:
        FileNotFoundError: it is not there.
        SafetensorError, OSError, ValueError: it is no such file.
    """
    if is_remote(path):
        from retrograd.core.runs.remote_shard import RemoteShard

        return RemoteShard(path)
    return safetensors.safe_open(expect_file(path), "pt")


def read_shard(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All entries of a shard, and the notes on them."""
    with open_shard(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, _read_notes(file)  # noqa: SIM118


def list_tensors(path: Path) -> dict[str, dict[str, Any]]:
    """The names of a shard's tensors, each with its note; reads the header alone."""
    with open_shard(path) as file:
        notes = _read_notes(file)
        return {name: notes.get(name, {}) for name in file.keys() if not name.endswith(INDICES)}  # noqa: SIM118


def read_tensor(path: Path, name: str, note: dict[str, Any]) -> torch.Tensor:
    """Read one tensor of a shard, as it was.

    Raises:
        ValueError: it is not what was written.
    """
    with open_shard(path) as file:
        names = [name, name + INDICES] if "sparse" in note else [name]
        entries = {each: file.get_tensor(each) for each in names}
    for each, told in zip(names, note.get(SUMS, ()), strict=False):  # the first version wrote none
        check_sum(entries[each], told, each)
    return decode_tensor(entries, name, note)


def write_shard(path: Path, entries: dict[str, torch.Tensor], notes: dict[str, Any]) -> None:
    """Write encoded tensors, and the notes on them by name, to which sums over their entries are added."""
    notes = {name: {**notes.get(name, {}), SUMS: _sum(entries, name)} for name in entries if not name.endswith(INDICES)}
    data = safetensors.torch.save(entries, {NOTES: json.dumps(notes)})
    with write_whole(path, aside=path.parent.parent) as file:
        file.write(data)


def _sum(entries: dict[str, torch.Tensor], name: str) -> list[int]:
    return [sum_tensor(entries[each]) for each in (name, name + INDICES) if each in entries]


def _read_notes(file: Any) -> dict[str, Any]:
    notes = parse_object((file.metadata() or {}).get(NOTES, "{}"))
    for name, note in notes.items():
        check_kinds({name: note}, {name: dict[str, Any]})
        check_kinds(note, _KINDS)
    return notes


# ---- one tensor ----


@contextmanager
def _on_own_stream(kept: KeptTensor) -> Iterator[None]:
    """Wait until a device has computed a tensor, and copy it beside what else the device has to do."""
    for event in kept.ready:
        event.synchronize()
    if not kept.tensor.is_cuda:
        yield
        return
    if not kept.ready:  # nobody has said when it is there
        torch.cuda.synchronize(kept.tensor.device)
    with torch.cuda.stream(_find_stream(kept.tensor.device)):
        yield


@cache
def _find_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class UnstorableTensorError(TypeError):
    """A tensor of a kind that has no data to store, or none that we can read."""


def encode_tensor(name: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Copy a tensor to the CPU in a form that safetensors holds.

    Returns:
        Entries by name, and a note of what was done; empty for a tensor that is stored as it is. ``kind`` is
        ``complex`` (real and imaginary part as a last axis of two) or ``bytes`` (elements as uint8, for element
        types that safetensors lacks; ``dtype``, ``shape``); ``sparse`` is the shape of a sparse one, whose
        values are under its name and whose indices under ``name#indices``.

    Raises:
        UnstorableTensorError: for a quantized tensor, one without data, or a layout that we do not know.
    """
    if tensor.is_meta or tensor.is_quantized:
        raise UnstorableTensorError(f"a {'meta' if tensor.is_meta else 'quantized'} tensor is not stored")
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        values, note = encode_tensor(name, tensor._values())
        indices = tensor._indices().to("cpu", copy=True).contiguous()
        return {**values, name + INDICES: indices}, {**note, "sparse": list(tensor.shape)}
    if tensor.layout is not torch.strided:
        raise UnstorableTensorError(f"the layout {tensor.layout} is not stored")
    data = tensor.to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()
    if data.is_complex():
        return {name: torch.view_as_real(data)}, {"kind": "complex"}
    if data.dtype in _PLAIN:
        return {name: data}, {}
    note = {"kind": "bytes", "dtype": str(data.dtype).removeprefix("torch."), "shape": list(data.shape)}
    return {name: data.as_strided((data.numel(),), (1,)).view(torch.uint8)}, note


def decode_tensor(entries: dict[str, torch.Tensor], name: str, note: dict[str, Any]) -> torch.Tensor:
    """The tensor that was encoded.

    Raises:
        ValueError, TypeError, RuntimeError: the note does not fit it.
    """
    data = entries[name]
    if note.get("kind") == "complex":
        data = torch.view_as_complex(data)
    elif note.get("kind") == "bytes":
        dtype = getattr(torch, note["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"there is no dtype {note['dtype']!r}")
        data = data.view(dtype).reshape(note["shape"])
    if "sparse" in note:
        data = torch.sparse_coo_tensor(entries[name + INDICES], data, note["sparse"], check_invariants=True)
    return data
