"""Where merged rows go that go no further."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from retrograd.core.merging.below import News
from retrograd.core.merging.holdings import Parcel
from retrograd.core.runs.ledger import Ledger


class Top(Protocol):
    """Where rows go that go no further."""

    def add_sites(self, names: Sequence[str]) -> None:
        """Name the next rows."""

    def add_parcel(self, parcel: Parcel) -> None:
        """Keep rows, and the means of losses."""

    def describe_sites(self, told: dict[str, Any]) -> None:
        """Keep what ranks hold at sites."""

    def describe_ranks(self, news: News) -> None:
        """Keep whose rows are merged, and what of them is not."""

    def begin(self, sessions: Collection[str]) -> Ledger:
        """Go on with what these sessions have written; returns the units in it."""

    @property
    def written(self) -> Ledger:
        """The units that need not be handed over again; an object of its own in each state."""

    def flush(self) -> None:
        """Return once all of it can be read."""
