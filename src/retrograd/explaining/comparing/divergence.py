"""The place where two runs part beyond noise, and what it means where no other difference explains it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from retrograd.core.amounts import list_names
from retrograd.core.history.sink import PHASES, Moment
from retrograd.core.runs.findings import Evidence, Finding
from retrograd.core.sites.site import Site, parse_leniently, read_accumulated
from retrograd.explaining.comparing.differences import knows_inputs
from retrograd.explaining.comparing.distance import FORMATS, GROWTH, ROUNDINGS, UPDATE, Distances, FloatArray, Floor
from retrograd.explaining.comparing.pairs import Pairs
from retrograd.explaining.findings.record import Record

LEAST = tuple(ROUNDINGS * each.epsilon for each in FORMATS)
"""Distances that rounding may allow, the largest first."""

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


class Place(NamedTuple):
    """A pair at which two runs may part, before it is known what rounding allows.

    Attributes:
        number: of the pair among all.
        told: the pair in words and numbers; its limit is still to be found.
        measured: the distance of repeated runs.
    """

    number: int
    told: Divergence
    measured: float


class StepPairs(NamedTuple):
    """The pairs of a step.

    Attributes:
        start: the number of the first one among all.
        pairs: they.
        measured: the distance of each in repeated runs.
    """

    start: int
    pairs: Pairs
    measured: FloatArray


class Search:
    """Looks for the first pair that differs, and the first that differs by more than noise.

    What rounding allows is known when all pairs were taken in. Until then those are kept that may be the place.

    Args:
        names: of the sites.
        letter: what the second run is called.
        is_measured: noise is measured by repeated runs.

    Attributes:
        count: pairs that were taken in.
        differing: how many of them differ in any bit.
        largest: the largest of their distances.
        first: the first pair that differs in any bit.
        steps: the pairs of the steps of places, and those of the first one.
    """

    def __init__(self, names: Sequence[str], letter: str, *, is_measured: bool) -> None:
        self._letter, self._is_measured = letter, is_measured
        number_of = {name: number for number, name in enumerate(names)}
        gradients = [f"{name.removesuffix('.update')}.grad" if name.endswith(".update") else "" for name in names]
        self._gradient_of = [number_of.get(name) for name in gradients]
        self._apart, self._differs = np.zeros(len(names)), np.zeros(len(names), np.bool_)
        """Of each site the largest distance so far, relative to its size, and whether any pair has differed."""
        self._places: list[Place] = []
        self._found = dict.fromkeys((0.0, *LEAST), False) if is_measured else {}
        """For what rounding may allow, whether a pair was found that differs by more."""
        self.count = self.differing = 0
        self.largest = 0.0
        self.first: Place | None = None
        self.steps: dict[int, StepPairs] = {}

    def add(self, pairs: Pairs, distances: Distances, measured: FloatArray) -> None:
        """Take in the next pairs, and the distances of each in repeated runs."""
        self._keep_step(pairs, 0, measured)
        differing = np.flatnonzero(~distances.is_same)
        if len(differing) and self.first is None:
            self.first = self._describe(pairs, distances, int(differing[0]), measured)
        for place in self._find_over(distances.usual, measured):
            if self._is_measured or distances.usual[place] > self._limit_of_update(pairs, distances, place):
                self._places.append(self._describe(pairs, distances, place, measured))
                self._keep_step(pairs, int(pairs.of_a("step")[place]), measured)
        np.maximum.at(self._apart, pairs.site[differing], distances.own[differing])
        self._differs[pairs.site[differing]] = True
        self.count, self.differing = self.count + len(pairs), self.differing + len(differing)
        self.largest = float(np.maximum(self.largest, distances.usual.max(initial=0.0)))

    def _find_over(self, usual: FloatArray, measured: FloatArray) -> list[int]:
        """The pairs that may be the first that differs by more than noise, rising.

        Where noise is only estimated, differences that grow step by step out of rounding are noise, too: a pair counts
        only when its distance cannot have grown out of any earlier one.
        """
        if not self._is_measured:
            before = np.maximum.accumulate(np.concatenate(([self.largest], usual)))[:-1]
            return np.flatnonzero(usual > np.maximum(GROWTH * before, LEAST[-1])).tolist()
        found = set()
        for limit in [limit for limit, is_found in self._found.items() if not is_found]:
            over = usual > np.maximum(limit, measured)
            if over.any():
                self._found[limit] = True
                found.add(int(over.argmax()))
        return sorted(found)

    def _limit_of_update(self, pairs: Pairs, distances: Distances, place: int) -> float:
        """The allowed distance of an update of a parameter whose gradient has differed; 0 for other pairs."""
        gradient = self._gradient_of[pairs.site[place]]
        if gradient is None:
            return 0.0
        before = np.flatnonzero(pairs.site[:place] == gradient)
        if not self._differs[gradient] and distances.is_same[before].all():
            return 0.0
        apart = np.maximum(self._apart[gradient], distances.own[before].max(initial=0.0))
        return float(np.maximum(UPDATE, GROWTH * apart))

    def _keep_step(self, pairs: Pairs, step: int, measured: FloatArray) -> None:
        if step not in self.steps:
            start, of_step = pairs.of_step(step)
            if len(of_step):
                self.steps[step] = StepPairs(self.count + start, of_step, measured[start : start + len(of_step)].copy())

    def find_parting(self, floor: Floor) -> Place | None:
        """The first pair that differs by more than noise, once all pairs were taken in."""
        return next((each for each in self._places if each.told.distance > limit_at(each, floor)), None)

    def _describe(self, pairs: Pairs, distances: Distances, place: int, measured: FloatArray) -> Place:
        """A pair in words and numbers."""
        a, b = ({name: pairs.column(name, which)[place].item() for name in _TOLD} for which in (0, 1))
        told = Divergence(
            pairs.names[int(pairs.site[place])],
            Moment(a["step"], a["micro"], a["backward"], PHASES[a["phase"]]),
            a["rank"],
            float(distances.usual[place]),
            0.0,
            _size(a),
            _size(b),
            (a["count"], b["count"]),
            self._letter,
        )
        return Place(self.count + place, told, float(measured[place]))


_TOLD = ("step", "micro", "backward", "phase", "rank", "count", "sum", "m2")


def limit_at(place: Place, floor: Floor) -> float:
    """The distance that noise allows at a place."""
    return float(floor.limit(np.array([place.number]), np.array([place.measured]))[0])


def _size(row: Mapping[str, Any]) -> float:
    count, total, m2 = (float(row[name]) for name in ("count", "sum", "m2"))
    return float(np.sqrt(m2 / count + (total / count) ** 2)) if count else 0.0


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
    if (parameter := read_accumulated(site)) is not None:
        given = f"What the optimizer is given for {parameter} differs at step {step}"
        return "update", f"{given}, though the gradients of all passes agree: something changes .grad after them."
    if site.quantity == "update":
        return "update", f"The update of {site.value} differs at step {step}, though its gradient agrees."
    if site.quantity == "grad":
        return _explain_gradient(site, step, before.no_gradient)
    if step and before.other_weights:
        names = list_names(before.other_weights)
        return "parameters", f"Before step {step} something has changed {names}, though all updates agree."
    if before.no_forward and not knows_inputs:
        if before.knows_weights:
            return ("inputs", f"The input of the model differs from step {step} on: {site} does, parameters agree.")
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
