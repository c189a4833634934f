"""The rows of a recording: which site has which number, and whether anything was ever recorded of it.

A sink is told of a module's second and further calls only when they have rows or kept tensors: until a backward pass
has come nobody knows whether a call is one of them, or the first one of an evaluation. So its numbers may not be ours.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.history.sink import RowBatch, Sink
from retrograd.recording.batches import rename_rows
from retrograd.recording.holder import Source
from retrograd.recording.mode_buffer import ModeBuffers
from retrograd.sites.site import Site
from retrograd.statistics.row import ROW


class RowTable:
    """Numbers sites in the order in which they come up.

    Attributes:
        sites: sites by number.
        names: their printed names.
    """

    def __init__(self, buffers: ModeBuffers, sink: Sink) -> None:
        self._buffers = buffers
        self._sink = sink
        self._numbers: dict[Site, int] = {}
        self._seen = np.zeros(0, dtype=bool)
        self._told: dict[int, int] = {}
        self._kept: set[str] = set()
        self._is_translated = False
        self._adding = threading.RLock()  # a model may run in several threads
        self.sites: list[Site] = []
        self.names: list[str] = []

    def number(self, site: Site) -> int:
        """The row of a site, a new one if it has none."""
        row = self._numbers.get(site)
        return self._add(site) if row is None else row

    def _add(self, site: Site) -> int:
        with self._adding:
            row = self._numbers.get(site)
            if row is not None:
                return row
            row = self._buffers.add_row()
            self.sites.append(site)
            self.names.append(str(site))
            if site.call == 1:
                self._tell(row)
            self._numbers[site] = row  # last: who finds it finds all of it
            return row

    def translate(self, batch: RowBatch) -> RowBatch:
        """A batch by the numbers of the sink, which is told of the sites that it does not know yet."""
        if len(self._told) < len(self.sites):
            for row in np.frombuffer(batch.rows, ROW)["row"].tolist():
                self._tell(row)
        return rename_rows(batch, self._told) if self._is_translated else batch

    def name_kept(self, sources: Iterable[Source]) -> None:
        """Tell the sink of sites of which tensors are kept, if it does not know them yet."""
        for source in sources:
            if source.name not in self._kept:
                self._kept.add(source.name)
                self._tell(self.number(source.site))

    def _tell(self, row: int) -> None:
        """Tell the sink of a row, if it does not know it yet."""
        with self._adding:
            if row not in self._told:
                self._is_translated |= row != len(self._told)
                self._told[row] = len(self._told)
                self._sink.add_sites([self.names[row]])

    def mark(self, rows: npt.NDArray[Any]) -> None:
        """These rows have been recorded."""
        if len(self._seen) < len(self.sites):
            self._seen = np.concatenate([self._seen, np.zeros(len(self.sites) - len(self._seen), dtype=bool)])
        self._seen[rows] = True

    @property
    def recorded(self) -> list[Site]:
        """Sites of which something has been recorded."""
        return [self.sites[row] for row in np.flatnonzero(self._seen)]
