"""The folder of one rank, as its process writes it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np

from retrograd.core.files import make_storable, remove_unfinished, write_json, write_whole
from retrograd.core.history.names import SiteNames
from retrograd.core.history.rows import Part, decode_batches
from retrograd.core.history.sink import Event, KeptTensor, RowBatch
from retrograd.core.history.table import build_event_table, build_table, find_last_loss
from retrograd.core.runs.attempts import name_attempt
from retrograd.core.runs.layout import EVENTS, RANK_FILE, STATISTICS, TENSORS
from retrograd.core.runs.parts import PartFolder, compact
from retrograd.core.runs.placements import write_placements
from retrograd.core.runs.queue import Unwritten
from retrograd.core.runs.ranks import RankClaim
from retrograd.core.runs.shards import ShardFolder


class RankFolder:
    """Writes rows, events and tensors of one process.

    Args:
        claim: the hold on the folder.
        step: where a resumed run begins anew: whatever is of this step or later is removed. None keeps all steps.
        tensor_budget: bytes of all tensor files.
        max_waiting: bytes of tensors that may wait while files cannot be written.
        count_added: see :class:`retrograd.core.runs.shards.ShardFolder`.

    Attributes:
        next_step: one more than the last step of which there are rows or a loss, at the start.
        names: the sites.
        error: the exception that ended the process, as :mod:`retrograd.core.runs.ending` tells it; None for none.
        attempt: which process this is, for a later one that goes on with the folder.

    Raises:
        DamagedRunError: a file of the run to continue cannot be read.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        claim: RankClaim,
        *,
        step: int | None,
        tensor_budget: int,
        max_waiting: int,
        count_added: Callable[[], int],
    ) -> None:
        self._claim = claim
        self._began = time.time()
        self.names = SiteNames()
        self._placements: Mapping[str, Any] = {}
        self._is_placed = True
        self._recorded: set[str] = set()
        self.error: dict[str, Any] | None = None
        self.attempt = replace(name_attempt(), step=step if claim.is_continued else None)
        folder = claim.folder
        step = 0 if step is None and claim.is_taken_over else step
        remove_unfinished(folder)
        self._statistics = PartFolder(folder / STATISTICS)
        self._events = PartFolder(folder / EVENTS)
        self.shards = ShardFolder(folder / TENSORS, tensor_budget, count_added, max_waiting)
        if step is not None:
            self._statistics.cut(step)
            self._events.cut(step)
            self.shards.cut(step)
        self._rows = self._statistics.count_rows()
        self._event_counts = self._events.count_texts("kind")
        self._span = self._statistics.find_step_limits()
        # fewer steps may have rows than losses: by a schedule, or where a kill came between the two
        losses = map(find_last_loss, self._events.read_newest_first(["kind", "step"]))
        last_loss = next((step for step in losses if step is not None), -1)
        self.next_step = 1 + max(last_loss, self._span[1] if self._span else -1)

    @property
    def sites(self) -> list[str]:
        """The sites of which this session has written something, in the order named; before it has, all."""
        return [name for name in self.names.written if name in self._recorded] or self.names.written

    def settle(self) -> bool:
        """Move to the folder of the rank as it is known by now; what somebody has removed is made again.

        Returns:
            Whether something had to be made again.

        Raises:
            RunExistsError: somebody else has begun a run there.
            OSError: it cannot be made.
        """
        is_new = self._claim.settle()
        is_new |= self._statistics.settle(self._claim.folder / STATISTICS)
        is_new |= self._events.settle(self._claim.folder / EVENTS)
        self.shards.folder = self._claim.folder / TENSORS
        if is_new and self._placements:
            self._is_placed = False
        return is_new

    def write_rows(self, batches: Sequence[RowBatch]) -> None:
        """Write rows as one more part file."""
        columns = decode_batches(batches, self.names.gradients, codes=self.names.codes)
        columns["site"] = self.names.codes[columns["site"]]
        self.write_columns(columns)

    def write_columns(self, columns: Part) -> None:
        """Write rows sorted by site, of which ``site`` is the code of a name, as one more part file."""
        if not len(columns["step"]):
            return
        written = self.names.written
        self._statistics.add(build_table(columns, written))
        self._recorded.update(written[code] for code in np.unique(columns["site"]))
        self._rows += len(columns["step"])
        steps = [int(columns["step"].min()), int(columns["step"].max()), *(self._span or ())]
        self._span = min(steps), max(steps)

    def write_placements(self) -> None:
        """Write what this process holds at its sites, if that is new."""
        if not self._is_placed:
            write_placements(self._claim.folder, self._placements)
            self._is_placed = True

    def place(self, told: Mapping[str, Any]) -> None:
        """Write this with the next rows, as what this process holds at its sites."""
        self._placements, self._is_placed = told, False

    def write_file(self, name: str, write: Callable[[BinaryIO], None]) -> None:
        """Write a file of another kind."""
        with write_whole(self._claim.folder / name) as file:
            write(file)

    def copy_tensors(self, tensors: Sequence[KeptTensor]) -> None:
        """Copy tensors before training changes them."""
        for kept in tensors:
            self.shards.copy(kept)
            self._recorded.add(kept.site)

    def take_news(self) -> list[Event]:
        """Take the events about tensors since this was last asked."""
        news, self.shards.news = self.shards.news, []
        return news

    def write_events(self, events: Sequence[Event]) -> None:
        """Write events as one more part file."""
        named = [replace(event, name=make_storable(event.name), text=make_storable(event.text)) for event in events]
        self._events.add(build_event_table(named))
        self._event_counts.update(event.kind for event in events)

    def tidy(self) -> None:
        """Merge small part files."""
        compact(self._statistics)
        compact(self._events)

    def write_status(self, status: str, lost: Unwritten) -> None:
        """Write the rank's status file."""
        content: dict[str, Any] = {
            "rank": self._claim.rank,
            "status": status,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "began": self._began,
            "written": time.time(),
            "first_step": self._span and self._span[0],
            "last_step": self._span and self._span[1],
            "rows": self._rows,
            "events": dict(self._event_counts),
            "error": self.error,
            "attempt": self.attempt.tell(),
            "tensor_bytes": self.shards.bytes,
            "tensors_dropped": self.shards.dropped,
            "lost": lost.tell(),
        }
        write_json(self._claim.folder / RANK_FILE, content)
