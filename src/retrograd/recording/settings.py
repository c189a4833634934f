"""Settings: what to record, and when, as a user chose it, read and checked once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from retrograd.errors import StatisticError
from retrograd.history.table import TAKEN_NAMES
from retrograd.recording.keep import DEFAULT_BUDGET, Keep, as_keeps, read_limit
from retrograd.recording.schedule import Schedule, as_schedule
from retrograd.sites.pattern import Candidate, Pattern
from retrograd.sites.selection import Selection
from retrograd.sites.site import local_gradient
from retrograd.statistics.custom import CustomStatistics, check_statistic
from retrograd.statistics.custom import Statistic as CheckedStatistic
from retrograd.statistics.row import EXPONENT_BIAS

Statistic = Any


class Settings:
    """The choices of one recording.

    Args:
        sites: which sites get statistics; see :class:`~retrograd.sites.selection.Selection`. None: every module's
            output and its gradient, every parameter's gradient and update.
        schedule: which steps; a number n stands for every n-th.
        tensors: which tensors are kept; patterns, or :class:`~retrograd.recording.keep.Keep` policies.
        statistics: True for the built-in ones, False for none, or functions tensor → number to add to them.
        histogram: count binary exponents too.
        tensor_budget: bytes of kept tensors that are never passed.

    Raises:
        RecordingError: for a choice that cannot be carried out.
    """

    def __init__(
        self,
        *,
        sites: Pattern | Iterable[Pattern] | None = None,
        schedule: int | Schedule | None = None,
        tensors: Keep | Pattern | Iterable[Keep | Pattern] | None = None,
        statistics: bool | Iterable[Statistic] = True,
        histogram: bool = True,
        tensor_budget: int | str = DEFAULT_BUDGET,
    ) -> None:
        self.selection = Selection(sites)
        self.schedule = as_schedule(schedule)
        self.keeps = as_keeps(tensors)
        self.statistics = statistics is not False
        self.custom = [] if isinstance(statistics, bool) else [_check_custom(each) for each in statistics]
        self.histogram = histogram
        self.tensor_budget = read_limit(tensor_budget)

    def check(self, candidates: Sequence[Candidate]) -> None:
        """Make sure that every pattern can match a site of the models.

        Raises:
            NoSuchSiteError: naming the nearest.
        """
        candidates = [*candidates, *_list_local(candidates)]
        if self.statistics:
            self.selection.check(candidates)
        for keep in self.keeps:
            keep.selection.check(candidates)

    def wants_statistics(self, candidate: Candidate) -> bool:
        """Whether this site gets a row."""
        return self.statistics and self.selection.wants(candidate)

    def may_reach(self, candidate: Candidate) -> bool:
        """Whether this site, or one nested in it, is wanted for anything."""
        return (self.statistics and self.selection.may_reach(candidate)) or any(
            keep.selection.may_reach(candidate) for keep in self.keeps
        )

    def names(self, key: str) -> bool:
        """Whether a pattern has this key among its words."""
        patterns = [*self.selection.patterns, *(pattern for keep in self.keeps for pattern in keep.selection.patterns)]
        return any(re.search(rf"\b{key}\b", pattern) for pattern in patterns if isinstance(pattern, str))

    def make_custom(self) -> CustomStatistics | None:
        """An accumulator for the users' own statistics; None when there are none."""
        return CustomStatistics(self.custom) if self.custom else None

    def describe(self) -> dict[str, Any]:
        """The choices as plain data, for the manifest."""
        return {
            "selection": self.selection.describe() if self.statistics else [],
            "schedule": repr(self.schedule),
            "tensors": [text for keep in self.keeps for text in keep.selection.describe()],
            "statistics": {each.name: each.merge for each in self.custom},
            "histogram": {"recorded": self.histogram and self.statistics, "exponent_bias": EXPONENT_BIAS},
            "tensor_budget": self.tensor_budget,
        }


def _list_local(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The parts of gradients that single processes find: recorded where they are named, and never by default."""
    return [
        Candidate(local_gradient(each.site.value), each.module)
        for each in candidates
        if each.site.quantity == "grad" and each.site.slot not in ("output", "input")
    ]


def _check_custom(given: Statistic) -> CheckedStatistic:
    statistic = check_statistic(given)
    if statistic.name in TAKEN_NAMES:
        raise StatisticError(
            f"A statistic cannot be called {statistic.name!r}.",
            repair='give it another name: `rg.statistic(name="…")`.',
            reason="a column of the record has that name.",
        )
    return statistic
