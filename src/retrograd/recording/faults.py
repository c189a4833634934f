"""Faults of ours never stop a training step: each is said once, counted, and left for the manifest."""

from __future__ import annotations

import sys
import warnings
from collections import Counter

from retrograd.errors import RetrogradWarning
from retrograd.statistics.slab import UnreadableTensorError


class Faults:
    """What went wrong at the taps, by site.

    Attributes:
        counts: how often, by site.
        reasons: the first error of each site.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}

    def add(self, site: str, error: Exception) -> bool:
        """Count an error; returns whether it is the first of its site, and says it if so.

        A tensor of a kind that has no numbers to read is no fault, so nothing is said of it.
        """
        self.counts[site] += 1
        if self.counts[site] > 1:
            return False
        self.reasons[site] = f"{type(error).__name__}: {error}"
        if not isinstance(error, UnreadableTensorError):
            say(f"retrograd could not record {site}: {self.reasons[site]}. Training goes on.")
        return True


def say(text: str) -> None:
    """Warn, also where the user turns warnings into errors: ours must not end a training step."""
    try:
        warnings.warn(text, RetrogradWarning, stacklevel=3)
    except RetrogradWarning as warning:
        print(f"RetrogradWarning: {warning}", file=sys.stderr)
