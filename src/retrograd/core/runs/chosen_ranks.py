"""Which ranks of a program record. Loads without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from retrograd.core.amounts import list_names
from retrograd.core.errors import RecordingError

Ranks = str | int | Iterable[int]
"""``"all"``, a share as in ``"1/8"``, or ranks as in ``"0,8,16"``, ``[0, 8, 16]`` and ``0``."""


@dataclass(frozen=True, slots=True)
class ChosenRanks:
    """The ranks that record.

    Attributes:
        every: of so many ranks the first one records, from rank 0 on; 0 where they are listed.
        listed: the ranks, rising.
    """

    every: int = 1
    listed: tuple[int, ...] = ()

    def __contains__(self, rank: int) -> bool:
        return rank in self.listed or (self.every > 0 and rank % self.every == 0)

    @property
    def are_all(self) -> bool:
        """True if every rank records."""
        return self.every == 1

    @property
    def first(self) -> int:
        """The lowest of them, which writes the manifest."""
        return self.listed[0] if self.listed else 0

    def __str__(self) -> str:
        if self.listed:
            return f"only rank{'s' if len(self.listed) > 1 else ''} {list_names(list(map(str, self.listed)))}"
        return f"only one rank in {self.every}" if self.every > 1 else "all ranks"

    def describe(self) -> dict[str, Any]:
        """What the manifest holds of it."""
        return {"ranks": None if self.are_all else {"every": self.every, "listed": list(self.listed)}}


def read_ranks(given: Ranks) -> ChosenRanks:
    """Read which ranks are to record.

    Raises:
        RecordingError: it names no rank.
    """
    parts = given.split(",") if isinstance(given, str) else [given] if isinstance(given, int) else given
    texts = [str(part).strip() for part in parts]
    share = re.fullmatch(r"all|1/(?P<every>[1-9]\d*)", ",".join(texts))
    if share is not None:
        return ChosenRanks(int(share["every"] or 1))
    if not texts or not all(map(str.isdecimal, texts)):
        raise RecordingError(
            f"ranks {given!r} names no ranks.", repair='give "all", ranks as in "0,8,16", or a share as in "1/8".'
        )
    return ChosenRanks(0, tuple(sorted(set(map(int, texts)))))


def tell_chosen(manifest: Mapping[str, Any]) -> str:
    """Whose rows a run has: ``"only ranks 0 and 8 of 16 recorded"``; empty where all ranks were to record."""
    chosen, processes = find_chosen(manifest), manifest.get("processes")
    of_all = f" of {processes}" if isinstance(processes, int) and processes > 1 else ""
    return "" if chosen.are_all else f"{chosen}{of_all} recorded"


def find_chosen(manifest: Mapping[str, Any]) -> ChosenRanks:
    """The ranks that were to record a run."""
    match manifest.get("ranks"):
        case {"every": int(every), "listed": [*listed]} if all(isinstance(rank, int) for rank in listed):
            return ChosenRanks(every, tuple(listed))
    return ChosenRanks()  # also where somebody has written something else
