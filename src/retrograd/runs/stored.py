"""The rows and tensors of a run folder, read when they are first asked for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import safetensors

from retrograd.addresses import reaching
from retrograd.errors import DamagedRunError, RunUnreachableError
from retrograd.history.kept import Kept, unscale
from retrograd.history.names import SiteNames
from retrograd.history.rows import FIXED_TYPES
from retrograd.history.sink import PHASES, Event
from retrograd.history.table import STATISTICS_NAMES, read_codes, read_numbers
from retrograd.runs.layout import list_shards
from retrograd.runs.parts import explain_damage, open_part
from retrograd.runs.placements import Placements

if TYPE_CHECKING:
    import torch

_LARGEST = np.iinfo(np.uint32).max
_LATER_COLUMNS = frozenset({"order"})
"""Columns that records have not always had; −1 where they are missing."""

_PHASE_CODES = {str(phase): code for code, phase in enumerate(PHASES)}


class StoredRows(Mapping[str, npt.NDArray[Any]]):
    """Columns of a part file.

    The file stays open, so that it can be read after the writer has merged it into a larger one.

    Args:
        path: the file.
        names: the sites, to which those of this file are added.
        rank: the rank it is from.
        rename: the name in ``names`` of a site of this file.

    Raises:
        DamagedRunError: it cannot be read; the columns themselves raise it too.
        FileNotFoundError: it has been merged into another one meanwhile.
    """

    def __init__(self, path: Path, names: SiteNames, rank: int, rename: Callable[[str], str]) -> None:
        self.path = path
        self._file = open_part(path)
        self._lock = threading.Lock()
        self._rank = rank
        found = self._file.schema_arrow.names
        self._names = [*FIXED_TYPES, *(name for name in found if name not in STATISTICS_NAMES)]
        with explain_damage(path):
            missing = STATISTICS_NAMES.difference(found, _LATER_COLUMNS)
            if missing:
                raise ValueError(f"it lacks the columns {', '.join(sorted(missing))}")
            self._stretches: npt.NDArray[Any] | None = None
            self._sites = read_codes(self._file.read(columns=["site"])["site"], names.code_of, rename)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name == "site":
            return self._sites
        if name == "rank":
            return np.full(len(self._sites), self._rank, np.int32)
        if name not in self._names:
            raise KeyError(name)
        with self._lock, explain_damage(self.path):
            column = self._read(name)
            if name != "bins" and len(column) != len(self._sites):
                raise ValueError(f"{name!r} has {len(column)} values for {len(self._sites)} rows")
            return column

    def __contains__(self, name: object) -> bool:
        return name in self._names  # a Mapping would read the column to find out

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _read_bins(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[Any]]:
        """Lengths and values of the lists, in as few bytes as they need: there are many of them."""
        lengths, values = [np.empty(0, np.int32)], [np.empty(0, np.uint32)]
        for group in range(self._file.num_row_groups):
            for lists in self._file.read_row_group(group, columns=["bins"])["bins"].chunks:
                lengths.append(np.asarray(lists.value_lengths()))
                flat = np.asarray(lists.flatten())
                values.append(flat.astype(np.uint32) if flat.max(initial=0) <= _LARGEST else flat)
        counts = np.concatenate(lengths)
        if counts.dtype.kind != "i" or (counts < 0).any():  # lists that are missing have no length
            raise ValueError("'bins' has rows without a list")
        return counts, np.concatenate(values)

    def _read(self, name: str) -> npt.NDArray[Any]:
        if name == "bin_count":
            lengths, self._stretches = self._read_bins()  # whoever asks for the lengths will ask for the values next
            return lengths
        if name == "bins":
            stretches, self._stretches = self._stretches, None
            return self._read_bins()[1] if stretches is None else stretches
        if name in _LATER_COLUMNS and name not in self._file.schema_arrow.names:
            return np.full(len(self._sites), -1, FIXED_TYPES[name])
        column = self._file.read(columns=[name])[name]
        if name in _LATER_COLUMNS:  # rows from before may have been merged with later ones
            column = column.fill_null(-1)
        if name == "phase":
            return read_codes(column, dict(_PHASE_CODES)).astype(np.uint8)
        return read_numbers(column)


class StoredTensors:
    """Tensors that were kept whole, from all ranks.

    Args:
        folders: where the shards are, by rank.
        placements: by rank, what it holds, and so the names of its sites in the history.
        list_events: all events; those that report an overwritten tensor stand for it.
    """

    def __init__(
        self,
        folders: Mapping[int, Path],
        placements: Mapping[int, Placements],
        list_events: Callable[[], Sequence[Event]],
    ) -> None:
        self._placements = placements
        self._folders = folders
        self._list_events = list_events
        self._of_site: dict[str, list[Kept]] | None = None

    def find(self, site: str) -> list[Kept]:
        """The kept tensors of a site, by rising step.

        Raises:
            DamagedRunError: a shard cannot be read.
        """
        if self._of_site is None:
            self._of_site = self._index()
        return self._of_site.get(site, [])

    def _index(self) -> dict[str, list[Kept]]:
        listed = [kept for rank, folder in self._folders.items() for kept in self._list_folder(folder, rank)]
        overwritten = (event for event in self._list_events() if event.kind == "overwritten")
        listed += [Kept(event.moment, event.name, lambda: None) for event in overwritten]
        index: dict[str, list[Kept]] = {}
        for kept in sorted(listed, key=lambda kept: (kept.step, kept.rank, kept.micro, kept.backward)):
            index.setdefault(kept.site, []).append(kept)
        return index

    def _list_folder(self, folder: Path, rank: int) -> Iterator[Kept]:
        rename = self._placements[rank].rename
        shards = list_shards(folder)
        if not shards:
            return
        from retrograd.runs.shards import list_tensors, parse_name

        for _, path in shards:
            with _explain_damage(path):
                named = [(parse_name(name), name, note) for name, note in list_tensors(path).items()]
            for (moment, site), name, note in named:
                yield Kept(moment, rename(site), partial(_load, path, name, note), rank)


def _load(path: Path, name: str, note: dict[str, Any]) -> torch.Tensor:
    from retrograd.runs.shards import read_tensor

    with _explain_damage(path):
        return unscale(read_tensor(path, name, note), note.get("scale", 1.0))


@contextlib.contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    try:
        with reaching(path):
            yield
    except RunUnreachableError:
        raise
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DamagedRunError(
            f"{str(path)!r} cannot be read: {error}", repair="remove that file to read the rest of the run."
        ) from error
