"""Numbers that a format of few bits cannot hold: gradients that become zero, updates that round away."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from retrograd.core.amounts import count_of
from retrograd.core.history.sink import UPDATES
from retrograd.core.history.table import find_kinds
from retrograd.core.runs.findings import Finding
from retrograd.core.sites.site import Site
from retrograd.core.statistics.row import EXPONENT_BIAS
from retrograd.explaining.findings.births import Births
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.layers import Layers
from retrograd.explaining.findings.numbers import median
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import Training

family = Family(__name__)

SUBNORMAL = EXPONENT_BIAS - 14
"""First exponent bin of the normal numbers of half precision."""

FEWEST = 5
"""Steps that it takes."""

LOST = 0.5
"""Share of a parameter's elements that updates leave as they are, from which on they are lost."""

NEARLY_ALL = 0.8
"""Share from which on it is a warning where the loss falls, too."""

NARROW = ("bfloat16", "float16", "bf16", "half")
"""Types whose weights updates may round away."""

HALF = ("float16", "half")

SEARCH, CHURN = 20, 0.2
"""Updates in which loss scaling searches for a scale; share of later ones from which on it skips too many."""


@family.detector("underflow")
def underflow(record: Record, entry: Entry) -> Iterator[Finding]:
    """Gradients in half precision that are too small for it."""
    sites = _of_type(record, HALF, "grad")
    is_scaled = any(call.name.startswith("scaler.") for call in record.calls)
    sites += [] if is_scaled else _list_half_outputs(record)  # it does what is advised: why is not known
    if not sites:
        of_scaled = " outside of autocast with loss scaling, which is what is advised" if is_scaled else ""
        raise CannotTell(f"neither parameters nor outputs of float16 were recorded{of_scaled}")
    measured = [(site, *_measure_underflow(record, site)) for site in sites]
    low = [each for each in measured if (each[1] > 0.2 and each[2] > 0.5) or (each[1] > 0.05 and each[2] > 0.9)]
    if len(low) < max(0.25 * len(sites), 1):
        return
    site, zeros, share = max(low, key=lambda each: each[1])
    yield entry.finding(
        f"{zeros:.0%} of the gradients of {site.value} are zero, and {share:.0%} of the rest lie below 6.1e-05, "
        f"the smallest normal number of float16; so it is at {len(low)} of {len(sites)} places.",
        site=str(site.value),
        span=record,
        line=record.line_of(site.path),
        evidence=[
            ("share of zeros", zeros, "> 0.2, or > 0.05 where nearly all the rest is small"),
            ("share of the rest below 2⁻¹⁴", share, "> 0.5, or > 0.9"),
        ],
    )


def _measure_underflow(record: Record, site: Site) -> tuple[float, float]:
    series = record.series(site, histograms=True)
    scales = np.full(len(series.steps), np.inf)  # the least of all micro-batches of a step
    np.minimum.at(scales, np.searchsorted(series.steps, series.rows["step"]), series.rows["scale"])
    is_told = (scales >= 1) & ~np.isin(series.steps, list(record.once(Births).skipped))
    if is_told.sum() < FEWEST:  # a scale that has collapsed has overflowed before
        return 0.0, 0.0
    bins = series.exponents[1][is_told]
    scale = float(np.median(scales[is_told]))  # it was divided out: what is small was larger by that
    lowest = max(SUBNORMAL - round(np.log2(scale)), 0) if scale > 0 else SUBNORMAL
    total = bins.sum(axis=1)
    below = bins[:, :lowest].sum(axis=1)
    low = np.where(total > 0, below / np.maximum(total, 1), 1.0)
    return float(np.median(series.zero_share[is_told])), float(np.median(low))


@family.detector("bf16-update-lost")
def update_lost(record: Record, entry: Entry) -> Iterator[Finding]:
    """Updates that round away in weights of few bits."""
    updates = record.once(Training).updates
    if len(updates.steps) < 10:
        raise CannotTell(f"{len(updates.steps)} updates were recorded, and it takes 10")
    found = list(_measure_update_lost(record))
    lost = [each for each in found if each[1] > LOST and each[1] > each[2] + LOST * (1 - each[2])]
    if not lost or len(lost) < 0.5 * len(found) or record.once(Training).rate == 0:
        return
    site, still, zeros, kind = max(lost, key=lambda each: updates.elements[updates.sites.index(each[0])])
    fell = record.once(Training).fell
    yield entry.finding(
        f"{still:.0%} of the elements of {site.value} ({kind}) stay as they are at an update, though "
        f"{1 - zeros:.0%} have a gradient: updates round away, at {len(lost)} of "
        f"{count_of(len(found), 'parameter')}.",
        severity="note" if fell and still < NEARLY_ALL else "warning",
        site=str(site.value),
        step=int(updates.steps[0]),
        last_step=record.last_step,
        line=record.optimizer_line,
        evidence=[
            ("share of elements unchanged", still, f"> {LOST:g}"),
            ("share without a gradient", zeros, "by half less"),
        ],
        checked=[f"the weights are of {kind}", "the elements have a gradient"],
    )


def _measure_update_lost(record: Record) -> Iterator[tuple[Site, float, float, str]]:
    """List parameters of few bits: the share that updates leave, the share without a gradient, and the type."""
    updates, types, known = record.once(Training).updates, _need_types(record), set(record.sites)
    narrow = [
        site
        for site, elements in zip(updates.sites, updates.elements, strict=True)
        if any(name in types.get(str(site.value), "") for name in NARROW) and site.value.grad in known and elements >= 8
    ]
    found = record.numbers([(site, site.value.grad) for site in narrow], ("zero_share",))
    for site, (update, gradient) in zip(narrow, found, strict=True):
        still = float(np.nan_to_num(median(update.of["zero_share"])))
        yield site, still, float(np.median(gradient.of["zero_share"])), types[str(site.value)]


class Skips(NamedTuple):
    """Updates that loss scaling has skipped.

    Attributes:
        first: the step of the first one.
        skipped: which of all updates.
        scales: that of each recorded step.
    """

    first: int
    skipped: np.ndarray[tuple[int], np.dtype[np.bool_]]
    scales: dict[int, float]

    @property
    def late(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of those behind the search for a scale."""
        return self.skipped[SEARCH:]

    @property
    def last(self) -> float:
        """The scale in the end."""
        return self.scales[max(self.scales)] if self.scales else 1.0

    @property
    def churns(self) -> bool:
        """True if the scale is lowered again and again."""
        late = self.late
        return len(late) >= 10 and bool(late.mean() > CHURN) and bool(self.skipped.sum() > SEARCH)

    @property
    def are_many(self) -> bool:
        """True if they are more than the search for a scale takes, or no scale above 1 was found."""
        return self.churns or self.last < 1


def find_skips(record: Record) -> Skips | None:
    """The updates that loss scaling has skipped; None where there is none."""
    first = next((event for event in record.events if event.kind == "skipped"), None)
    if first is None:
        return None
    tried = record.history.all_events.pieces(["kind"], UPDATES)
    skipped = np.concatenate([find_kinds(piece, ["skipped"]) for piece in tried])
    scales = {event.moment.step: event.value for event in record.events if event.kind == "scale"}
    return Skips(first.moment.step, skipped, scales)


@family.detector("scaler-churn")
def scaler_churn(record: Record, entry: Entry) -> Iterator[Finding]:
    """A loss scale that is halved again and again."""
    skips = record.once(find_skips)
    if skips is None:
        raise CannotTell("no update was skipped by loss scaling")
    if not skips.are_many:
        return
    skipped, late, last = skips.skipped, skips.late, skips.last
    why, repair = _judge(skips.scales, {event.moment.step for event in record.events if event.kind == "skipped"})
    yield entry.finding(
        f"Loss scaling has skipped {skipped.sum()} of {len(skipped)} updates: {why}.",
        step=skips.first,
        last_step=record.last_step,
        line=next((call.line for call in record.called("scaler.step")), ""),
        evidence=[
            (f"share of updates skipped after the first {SEARCH}", float(late.mean()), f"> {CHURN:g}")
            if skips.churns
            else ("scale in the end", last, "< 1")
        ],
        repair=repair,
    )


def _judge(scales: dict[int, float], skipped: set[int]) -> tuple[str, str]:
    """Return why updates are skipped, and what to do, by the scales of steps: those that were skipped and the others.

    Args:
        scales: that of each recorded step.
        skipped: the steps whose update was skipped.
    """
    lost = sorted(skipped & scales.keys())
    if not lost:
        return "gradients overflow", ""
    after = [(scales[step], scales[then]) for step, then in pairwise(sorted(scales)) if step in skipped]
    held = [scale for before, scale in after if scale >= before]
    lowest = min(scales[step] for step in lost[len(lost) // 2 :])
    if len(held) > len(after) / 2:
        return (
            f"the scale is {held[-1]:g} again after an update that overflowed, and torch halves it there",
            "let scaler.update() choose the scale: leave its argument, and other writes to the scale, out.",
        )
    fine = [scale for step, scale in scales.items() if step not in skipped and step > lost[0]]
    if fine and max(fine) < lowest:
        return (
            f"gradients overflow at a scale of {lowest:g}, to which it is raised again and again",
            "raise growth_interval of the GradScaler: after so many updates it raises the scale (2000 by default).",
        )
    return (
        f"gradients overflow even at a scale of {lowest:g}",
        "find the value that overflows, and compute it in float32 or bfloat16: no scale helps.",
    )


def _need_types(record: Record) -> dict[str, str]:
    """Types of parameters, by name.

    Raises:
        CannotTell: none was recorded.
    """
    if not record.parameters:
        raise CannotTell("no type of a parameter was recorded")
    return {fact.name: fact.dtype for fact in record.parameters}


def _of_type(record: Record, types: tuple[str, ...], quantity: str) -> list[Site]:
    """Parameters of these types of which a quantity was recorded.

    Raises:
        CannotTell: no type was recorded.
    """
    known = _need_types(record)
    found = record.of_kind("parameter", quantity)
    return [site for site in found if known.get(str(site.value), "").removeprefix("torch.") in types]


def _list_half_outputs(record: Record) -> list[Site]:
    """Gradients of the outputs of layers whose operations make float16, as under autocast."""
    half = {
        operation.module
        for noted in record.operations[:1]
        for operation in noted.operations()
        if any(made.startswith("float16") for made in operation.makes)
    }
    return [
        each.site.grad for each in record.once(Layers).listed if each.path in half and each.site.grad in record.sites
    ]
