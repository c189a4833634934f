"""The tensors of a rank's shards, by site; each is loaded when asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors

from retrograd.errors import DamagedRunError
from retrograd.history.kept import Kept, unscale
from retrograd.history.sink import Event
from retrograd.runs.layout import list_shards
from retrograd.runs.placements import Placements

if TYPE_CHECKING:
    import torch


class StoredTensors:
    """What was kept whole, from all ranks.

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
        yield
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DamagedRunError(
            f"{str(path)!r} cannot be read: {error}", repair="remove that file to read the rest of the run."
        ) from error
