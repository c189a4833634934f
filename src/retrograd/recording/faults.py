"""Faults of ours never stop a training step: each is said once, counted, and left for the manifest."""

from __future__ import annotations

from collections import Counter

from retrograd.notices import warn
from retrograd.sites.site import Site
from retrograd.statistics.slab import UnreadableTensorError

_MOST_WARNINGS = 5


class Faults:
    """What went wrong at the taps, by site, or by what was being done where no one site is to blame.

    A tensor of a kind that has no numbers to read is not a fault: it is not recorded, and the reason is remembered.

    Attributes:
        counts: how often, by site.
        unreadable: sites that could not be read, and why.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.unreadable: dict[str, str] = {}
        self._said: set[str] = set()

    def add(self, where: Site | str, error: Exception) -> str:
        """Count an error; returns what it says if it is the first of its site, else an empty text.

        An error that was said of one site is not said again of another.
        """
        site = str(where)
        if isinstance(where, Site) and isinstance(error, UnreadableTensorError):
            self.unreadable.setdefault(site, str(error))
            return ""
        self.counts[site] += 1
        if self.counts[site] > 1:
            return ""
        reason = f"{type(error).__name__}: {error}"
        if reason not in self._said and len(self._said) < _MOST_WARNINGS:
            self._said.add(reason)
            warn(f"retrograd could not record {site}: {reason}. Training goes on; further faults are counted.")
        return reason
