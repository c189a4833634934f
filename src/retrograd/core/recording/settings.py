"""Settings: what to record, and when, as a user chose it, read and checked once; and the plan of what they select."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from retrograd.core.amounts import count_of, show_bytes
from retrograd.core.drawings import drawn_by
from retrograd.core.errors import StatisticError
from retrograd.core.guesses import names_arguments
from retrograd.core.hooks.names import list_modules, name_models
from retrograd.core.recording.keep import DEFAULT_BUDGET, Keep, as_keeps, find_keep, read_limit
from retrograd.core.recording.schedule import Schedule, as_schedule
from retrograd.core.sites.pattern import Candidate, Pattern, describe_pattern, names_functions
from retrograd.core.sites.selection import Selection
from retrograd.core.sites.site import local_gradient
from retrograd.core.statistics.custom import CustomStatistics, Statistic, check_statistic
from retrograd.core.statistics.row import BINS, EXPONENT_BIAS, ROW

UserStatistic = Any
"""A function from a tensor to one number."""


class Settings:
    """The choices of one recording.

    Args:
        sites: which sites get statistics; see :class:`~retrograd.core.sites.selection.Selection`. None: every module's
            output and its gradient, every parameter's gradient and update.
        schedule: which steps; a number n stands for every n-th.
        tensors: which tensors are kept; patterns, or :class:`~retrograd.core.recording.keep.Keep` policies.
        statistics: True for the built-in ones, False for none, or functions tensor → number to add to them.
        histogram: count binary exponents too.
        tensor_budget: bytes of kept tensors that are never passed.
        per_forward: forwards without grad are not merged.

    Raises:
        RecordingError: for a choice that cannot be carried out.
    """

    def __init__(
        self,
        *,
        sites: Pattern | Iterable[Pattern] | None = None,
        schedule: int | Schedule | None = None,
        tensors: Keep | Pattern | Iterable[Keep | Pattern] | None = None,
        statistics: bool | Iterable[UserStatistic] = True,
        histogram: bool = True,
        tensor_budget: int | str = DEFAULT_BUDGET,
        per_forward: bool = False,
    ) -> None:
        self.selection = Selection(sites)
        self.schedule = as_schedule(schedule)
        self.keeps = as_keeps(tensors)
        self.statistics = statistics is not False
        self.custom = [] if isinstance(statistics, bool) else [_check_custom(each) for each in statistics]
        self.histogram = histogram
        self.tensor_budget = read_limit(tensor_budget)
        self.per_forward = per_forward

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
        """True if this site gets a row."""
        return self.statistics and self.selection.wants(candidate)

    @property
    def selections(self) -> list[Selection]:
        """What says which sites get statistics, if any do, and which are kept."""
        return [*[self.selection][: self.statistics], *(keep.selection for keep in self.keeps)]

    def may_reach(self, candidate: Candidate) -> bool:
        """True if this site, or one nested in it, is wanted for anything."""
        return (self.statistics and self.selection.may_reach(candidate)) or any(
            keep.selection.may_reach(candidate) for keep in self.keeps
        )

    def names(self, key: str) -> bool:
        """True if a pattern has this key among its words."""
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


def _check_custom(given: UserStatistic) -> Statistic:
    from retrograd.core.history.table import TAKEN_NAMES  # late, for it loads Arrow

    statistic = check_statistic(given)
    if statistic.name in TAKEN_NAMES:
        raise StatisticError(
            f"A statistic cannot be called {statistic.name!r}.",
            repair='give it another name: `rg.statistic(name="…")`.',
            reason="a column of the record has that name.",
        )
    return statistic


_BYTES_A_ROW = ROW.itemsize
_BYTES_A_HISTOGRAM = 8 * BINS


@dataclass(frozen=True)
class PlannedSite:
    """A site that would be recorded.

    Attributes:
        name: its printed name.
        kind: the type of the module that has it.
        elements: how many elements it has; None for what is only known once the model runs.
        statistics: it gets a row.
        tensor_bytes: bytes of its tensor a step, where that is kept; None where unknown.
    """

    name: str
    kind: str
    elements: int | None
    statistics: bool
    tensor_bytes: int | None = 0

    def describe(self) -> tuple[str, str, str, str]:
        """Its name, the type of its module, its elements, and what is kept of it."""
        elements = "when it runs" if self.elements is None else f"{self.elements:,}"
        kept = ["statistics"] * self.statistics + ["tensor"] * (self.tensor_bytes != 0)
        return self.name, self.kind, elements, " ".join(kept)


@dataclass(frozen=True, repr=False)
class RecordingPlan:
    """A list of what would be recorded; print it.

    Attributes:
        sites: every site that would be.
        memory: bytes of rows that are held while training.
        bytes_per_step: bytes of statistics a recorded step, before compression.
    """

    sites: tuple[PlannedSite, ...]
    memory: int
    bytes_per_step: int

    def __str__(self) -> str:
        width = max((len(site.name) for site in self.sites), default=4)
        lines = [f"{'site':<{width}}  {'module':<20} {'elements':>12}  kept"]
        for site in self.sites:
            name, kind, elements, kept = site.describe()
            lines.append(f"{name:<{width}}  {kind:<20} {elements:>12}  {kept}")
        return "\n".join([*lines, self.total])

    __repr__ = __str__
    _repr_html_ = drawn_by("retrograd.core.views.notebook.records", "draw_recording_plan")

    @property
    def total(self) -> str:
        """How many sites there are, and what they take."""
        held, a_step = show_bytes(self.memory), show_bytes(self.bytes_per_step)
        total = f"{count_of(len(self.sites), 'site')}; statistics: {held} held, at most {a_step} a step"
        tensors = [site.tensor_bytes for site in self.sites if site.tensor_bytes != 0]
        if tensors:
            total += (
                f"; tensors of {count_of(len(tensors), 'site')}, {show_bytes(sum(filter(None, tensors)))} a step known"
            )
        return total


@names_arguments
def plan_recording(
    model: nn.Module | Mapping[str, nn.Module],
    *,
    sites: Pattern | Iterable[Pattern] | None = None,
    tensors: Keep | Pattern | Iterable[Keep | Pattern] | None = None,
    histogram: bool = True,
) -> RecordingPlan:
    """Return what :func:`record` would record, given the same arguments, without running the model.

    The shapes of activations are known only once the model runs, and so are the leaves of nested outputs.

    Raises:
        SiteError: for an invalid pattern, or one that matches nothing.
    """
    settings = Settings(sites=sites, tensors=tensors, histogram=histogram)
    entries = list_modules(name_models(model).items())
    candidates = [candidate for entry in entries for candidate in entry.candidates()]
    settings.check(candidates)
    sizes: dict[tuple[int, str], torch.Tensor] = {
        (id(entry.module), name): parameter for entry in entries for name, parameter in entry.parameters
    }
    planned = []
    for candidate in candidates:
        statistics = settings.wants_statistics(candidate)
        keep = find_keep(settings.keeps, candidate)
        if not statistics and keep is None:
            continue
        parameter = sizes.get((id(candidate.module), candidate.site.keys[-1]))
        planned.append(
            PlannedSite(
                name=str(candidate.site),
                kind=type(candidate.module).__name__,
                elements=None if parameter is None else parameter.numel(),
                statistics=statistics,
                tensor_bytes=0 if keep is None else None if parameter is None else parameter.nbytes,
            )
        )
    rows = sum(site.statistics for site in planned)
    size = rows * (_BYTES_A_ROW + (_BYTES_A_HISTOGRAM if histogram else 0))
    for selection in settings.selections:
        named = [describe_pattern(each).strip("'") for each in selection.patterns if names_functions(each)]
        keeps = None if selection is not settings.selection else 0
        planned += [PlannedSite(each, "functions", None, statistics=keeps == 0, tensor_bytes=keeps) for each in named]
    return RecordingPlan(tuple(planned), memory=size, bytes_per_step=size)
