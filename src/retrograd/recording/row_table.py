"""The rows of a recording: which site has which number, and whether anything was ever recorded of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.history.sink import Sink
from retrograd.recording.lane import Lanes
from retrograd.sites.site import Site


class RowTable:
    """Numbers sites in the order in which they come up.

    Attributes:
        sites: sites by number.
        names: their printed names.
    """

    def __init__(self, lanes: Lanes, sink: Sink) -> None:
        self._lanes = lanes
        self._sink = sink
        self._numbers: dict[Site, int] = {}
        self._seen = np.zeros(0, dtype=bool)
        self.sites: list[Site] = []
        self.names: list[str] = []

    def number(self, site: Site) -> int:
        """The row of a site, a new one if it has none."""
        row = self._numbers.get(site)
        if row is None:
            row = self._numbers[site] = self._lanes.add_row()
            self.sites.append(site)
            self.names.append(str(site))
            self._sink.add_sites(self.names[-1:])
        return row

    def mark(self, rows: npt.NDArray[Any]) -> None:
        """These rows have been recorded."""
        if len(self._seen) < len(self.sites):
            self._seen = np.concatenate([self._seen, np.zeros(len(self.sites) - len(self._seen), dtype=bool)])
        self._seen[rows] = True

    @property
    def recorded(self) -> list[Site]:
        """Sites of which something has been recorded."""
        return [self.sites[row] for row in np.flatnonzero(self._seen)]
