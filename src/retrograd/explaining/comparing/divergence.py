"""The place where two runs part beyond noise, and what it means where no other difference explains it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retrograd.core.amounts import list_names
from retrograd.core.history.rows import Part
from retrograd.core.history.sink import PHASES, Moment
from retrograd.core.runs.findings import Evidence, Finding
from retrograd.core.sites.site import Site, parse_leniently
from retrograd.explaining.comparing.differences import knows_inputs
from retrograd.explaining.comparing.distance import GROWTH, UPDATE, Distances, FloatArray, Floor
from retrograd.explaining.comparing.pairs import Pairs
from retrograd.explaining.findings.record import Record

_DRAWING = ("dropout", "bernoulli", "rand", "multinomial", "normal", "rrelu", "uniform", "exponential", "poisson")


@dataclass(frozen=True, slots=True)
class Divergence:
    """A site at one moment, of which the two runs have recorded different numbers.

    Attributes:
        site: its name.
        moment: moment of the rows.
        rank: rank of the rows.
        distance: their distance, relative to the size of the tensor.
        limit: the distance that noise allows.
        a, b: root mean squares in both.
        counts: numbers of elements in both.
        letter: what the second one is called.
    """

    site: str
    moment: Moment
    rank: int
    distance: float
    limit: float
    a: float
    b: float
    counts: tuple[int, int]
    letter: str

    @property
    def step(self) -> int:
        """The step."""
        return self.moment.step

    def __str__(self) -> str:
        moment = self.moment
        micro = f", micro-batch {moment.micro}" if moment.micro else ""
        phase = f", {moment.phase}" if moment.phase != "train" else ""
        rank = f" on rank {self.rank}" if self.rank else ""
        return f"{self.site} at step {moment.step}{micro}{phase}{rank}"

    def tell_distance(self) -> str:
        """Describe how far apart the two are, or what keeps them from having a distance."""
        if math.isfinite(self.distance):
            return f"with a relative difference of {self.distance:.2g}"
        one, other = self.counts
        if one != other:
            return f"in the number of elements, {one:,} in A and {other:,} in {self.letter}"
        return "in the number of elements that are NaN or infinite"


def find_first(pairs: Pairs, distances: Distances) -> int | None:
    """The first pair that differs in any bit."""
    return _first(~distances.is_same)


def find_parting(pairs: Pairs, distances: Distances, floor: Floor) -> int | None:
    """The first pair that differs by more than noise.

    Where noise is only estimated, differences that grow step by step out of rounding are noise, too: a pair counts only
    when its distance cannot have grown out of any earlier one.
    """
    over = distances.usual > floor.limits
    if floor.is_measured:
        return _first(over)
    before = np.maximum.accumulate(np.r_[0.0, distances.usual])[:-1]
    over &= distances.usual > GROWTH * before
    return _first(over & (distances.usual > _limit_of_updates(pairs, distances)))


def _limit_of_updates(pairs: Pairs, distances: Distances) -> FloatArray:
    """Allowed distances of updates of parameters whose gradient has differed; 0 for other rows."""
    limits = np.zeros(len(pairs))
    numbers = {name: number for number, name in enumerate(pairs.names)}
    for name, number in numbers.items():
        gradient = numbers.get(f"{name.removesuffix('.update')}.grad")
        if not name.endswith(".update") or gradient is None:
            continue
        own, theirs = (np.flatnonzero(pairs.site == each) for each in (number, gradient))
        if len(theirs):
            largest = np.maximum.accumulate(distances.own[theirs])
            differed = ~np.logical_and.accumulate(distances.is_same[theirs])
            place = np.maximum(np.searchsorted(theirs, own) - 1, 0)
            limits[own] = np.where(differed[place], np.maximum(UPDATE, GROWTH * largest[place]), 0.0)
    return limits


def describe_pair(pairs: Pairs, distances: Distances, floor: Floor, place: int, letter: str) -> Divergence:
    """Describe one pair in words and numbers."""
    a, b = pairs.rows_a.read_one(int(pairs.a[place])), pairs.rows_b.read_one(int(pairs.b[place]))
    moment = Moment(int(a["step"][0]), int(a["micro"][0]), int(a["backward"][0]), PHASES[int(a["phase"][0])])
    return Divergence(
        pairs.names[int(pairs.site[place])],
        moment,
        int(a["rank"][0]),
        float(distances.usual[place]),
        float(floor.limits[place]),
        _size(a),
        _size(b),
        (int(a["count"][0]), int(b["count"][0])),
        letter,
    )


def _size(row: Part) -> float:
    count, total, m2 = (float(row[name][0]) for name in ("count", "sum", "m2"))
    return float(np.sqrt(m2 / count + (total / count) ** 2)) if count else 0.0


def _first(which: npt.NDArray[np.bool_]) -> int | None:
    return int(np.argmax(which)) if which.any() else None


@dataclass(frozen=True, slots=True)
class Predecessors:
    """The rows before the place at which two runs part.

    Attributes:
        no_forward: nothing was recorded before it in its forward.
        no_gradient: no gradient was recorded before it in its pass.
        knows_weights: the sizes that parameters had before the update of this step were recorded.
        other_weights: the parameters whose sizes differed.
    """

    no_forward: bool
    no_gradient: bool
    knows_weights: bool
    other_weights: tuple[str, ...]


def tell_parting(parting: Divergence, a: Record, b: Record, before: Predecessors, *, is_explained: bool) -> Finding:
    """A finding about the place alone.

    Args:
        parting: the place.
        a: the first record.
        b: the second.
        before: the rows before it.
        is_explained: whether a known difference explains it; the finding then states the effect, not the cause.
    """
    site = parse_leniently(parting.site)
    has_other_inputs = parting.counts[0] != parting.counts[1]
    if (is_explained or has_other_inputs) and before.no_forward and site.quantity == "value":
        slug, message = "forward", f"The first output, {site}, differs at step {parting.step}."
    else:
        slug, message = _explain(site, parting.step, a, before, knows_inputs=knows_inputs(a, b))
    return Finding(
        detector=slug,
        severity="warning",
        message=message,
        site=parting.site,
        step=parting.step,
        line=_line_of(site, a),
        evidence=(
            Evidence("distance, relative to its size", parting.distance, f"> {parting.limit:.2g} by noise"),
            Evidence("root mean square in A", parting.a),
            Evidence(f"root mean square in {parting.letter}", parting.b),
        ),
        refute="a repeated run of the same program that differs as much: give it as noise",
    )


def _explain(site: Site, step: int, a: Record, before: Predecessors, *, knows_inputs: bool) -> tuple[str, str]:
    if site.quantity == "update" and str(site.value) in before.other_weights:
        return "parameters", f"Something has changed {site.value} before it was updated at step {step}."
    if site.quantity == "update":
        return "update", f"The update of {site.value} differs at step {step}, though its gradient agrees."
    if site.quantity == "grad":
        return _explain_gradient(site, step, before.no_gradient)
    if step and before.other_weights:
        names = list_names(before.other_weights)
        return "parameters", f"Before step {step} something has changed {names}, though all updates agree."
    if before.no_forward and not knows_inputs:
        if before.knows_weights:
            return (
                "inputs",
                f"The input of the model differs from step {step} on: {site} does, parameters agree.",
            )
        return "inputs-or-parameters", f"The first output, {site}, differs at step {step}: its inputs, or parameters."
    if _draws(site, a):
        return "random-state", f"{site.path} draws different random numbers at step {step}; its inputs agree."
    if before.no_forward:
        agrees = (
            "its inputs and parameters agree" if before.knows_weights and not before.other_weights else "inputs agree"
        )
        return "forward", f"The first output, {site}, differs at step {step}, though {agrees}."
    kind = a.type_of(site.path)
    named = f"{site.path} ({kind})" if kind else site.path
    return "forward", f"The forward of {named} differs at step {step}, though everything that ran before it agrees."


def _explain_gradient(site: Site, step: int, is_first: bool) -> tuple[str, str]:
    if is_first:
        message = f"The gradient that the loss sends to {site.value} differs at step {step}, though all outputs agree:"
        return "loss", f"{message} another loss, or other targets."
    if site.kind == "parameter":
        message = f"The gradient of {site.value} differs at step {step}, though those at later outputs agree."
    else:
        message = (
            f"The gradient at {site.value} differs at step {step}, though the forward and all later gradients agree."
        )
    return "backward", message


def _draws(site: Site, record: Record) -> bool:
    names = [each.name for fact in record.operations for each in fact.operations() if each.module == site.path]
    return "Dropout" in record.type_of(site.path) or any(name.startswith(_DRAWING) for name in names)


def _line_of(site: Site, record: Record) -> str:
    lines = (each.line for fact in record.operations for each in fact.operations() if each.module == site.path)
    return next(lines, "")
