"""Comparing two runs: :func:`compare`, and the comparison that it returns."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from retrograd.core.amounts import count_of, list_names
from retrograd.core.errors import CompareError
from retrograd.core.foreign.text import show_plainly
from retrograd.core.guesses import names_arguments
from retrograd.core.history.history import History
from retrograd.core.history.steps import number_steps
from retrograd.core.runs.findings import Finding
from retrograd.core.runs.reader import Run
from retrograd.core.sites.site import ROOT
from retrograd.explaining.comparing.differences import find_context, find_differences, find_dtypes
from retrograd.explaining.comparing.distance import FORMATS, Floor, Meter, Repeats
from retrograd.explaining.comparing.divergence import Divergence, Place, Predecessors, Search, limit_at, tell_parting
from retrograd.explaining.comparing.pairs import Pairing
from retrograd.explaining.findings.explain import make_record
from retrograd.explaining.findings.record import Record

Verdict = Literal["identical", "same within noise", "different"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two runs. True when they are the same within noise.

    Attributes:
        verdict: ``identical`` (to the last bit of the records), ``same within noise``, or ``different``.
        noise: source of the noise floor.
        first: the first place where they differ, even by a last bit; None where they are identical.
        parting: the first place where they differ by more than noise; None where they never do.
        largest: the largest distance of all rows, relative to the sizes of their tensors.
        findings: differences, grouped by cause: the first ones exist before or at the parting.
        context: other differences in how they were run, such as the commit.
        about: extent of the comparison.
        letter: what the second run is called in all of this; the first is A.
    """

    verdict: Verdict
    noise: str
    first: Divergence | None
    parting: Divergence | None
    largest: float
    findings: tuple[Finding, ...]
    context: tuple[str, ...]
    about: str
    letter: str

    def __bool__(self) -> bool:
        return self.verdict != "different"

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        lines = [f"{self.verdict}{self._tell_where()}"]
        for finding in self.findings:
            lines.append(f"  {finding.severity:<7}  {finding}")
            lines += [f"           hence: {each}" for each in finding.causes]
        lines += [f"  also     {each}" for each in self.context]
        return show_plainly("\n".join([*lines, f"compared: {self.about}"]))

    __repr__ = __str__

    def as_json_lines(self, run: str = "", **told: Any) -> str:
        """Write the verdict as a line of JSON, and each finding as another; ``run`` names the second run of several.

        Args:
            run: its name.
            told: more of both runs, as JSON values.
        """
        place = self.parting or self.first
        head = {
            **({"letter": self.letter, "run": run} if run else {}),
            "verdict": self.verdict,
            "noise": self.noise,
            "site": place.site if place else "",
            "step": place.step if place else None,
            "distance": place.distance if place else 0.0,
            "limit": place.limit if place else None,
            "context": list(self.context),
            **told,
        }
        plain = {name: str(value) if value == float("inf") else value for name, value in head.items()}
        lines = [json.dumps(plain, ensure_ascii=False, allow_nan=False), *(each.as_json() for each in self.findings)]
        return "".join(f"{line}\n" for line in lines)

    def _tell_where(self) -> str:
        if self.parting is not None:
            place = self.parting
            allowed = f" (noise explains {place.limit:.2g}: {self.noise})" if math.isfinite(place.distance) else ""
            return f": they diverge at {place} {place.tell_distance()}{allowed}"
        if self.first is not None:
            most = f" there and {self.largest:.2g} at most" if math.isfinite(self.largest) else ""
            return f": they differ from {self.first} on, {self.first.tell_distance()}{most} ({self.noise})"
        return ""


Recorded = Run | History | str | os.PathLike[str]


@names_arguments
def compare(a: Recorded, b: Recorded, *, noise: Sequence[Recorded] = (), letter: str = "B") -> Comparison:
    """Find where two runs first diverge, in the order in which training ran, and why.

    Rows of the same site at the same moment are compared. The noise between them is measured by repeated runs, if these
    are given; otherwise it is estimated from the rounding of their number formats, and from how rounding grows.

    Args:
        a: a run, its folder or that of a single rank (``RUN/rank00000``), or a history.
        b: the other one.
        noise: runs of the same program as ``a``, with the same seed.
        letter: what ``b`` is called in what is said; ``a`` is A.

    Returns:
        A verdict (``identical``, ``same within noise``, ``different``), the first place, and findings by cause.

    Raises:
        CompareError: their records have nothing in common.
        NotARunError, DamagedRunError: a folder cannot be read.
    """
    records = [make_record(each) for each in (a, b)]
    repeats = [make_record(each).history for each in noise]
    found = _Comparing(records[0], records[1], repeats, letter)
    unread = [each for each in records if each.history.rows.left_out and not each.history.rows.count]
    if unread:
        which = list_names([name for name, each in zip(("A", letter), records, strict=True) if each in unread])
        raise CompareError(
            f"No row of {which} could be read: {unread[0].missing()} left out.",
            repair="copy the damaged files again from where the run was recorded.",
        )
    if not found.search.count:
        raise CompareError(
            "The two have nothing in common: no site was recorded in both at the same step.",
            repair="compare runs of the same model, recorded with the same sites and schedule.",
        )
    return found.conclude()


class _Comparing:
    """Two records, whose pairs are taken in some steps after the others."""

    def __init__(self, a: Record, b: Record, repeats: Sequence[History], letter: str) -> None:
        self._a, self._b, self._letter = a, b, letter
        pairing = Pairing(a.history, b.history)
        self._names = pairing.names
        noise = Repeats(self._names, a.history, repeats) if repeats else None
        self._floor = Floor(self._names, (find_dtypes(a), find_dtypes(b)), noise)
        self.search = Search(self._names, letter, is_measured=noise is not None)
        self._missing = self._steps = 0
        meter = Meter(self._names)
        for pairs in pairing.in_spans():
            self.search.add(pairs, meter.measure(pairs), self._floor.add(pairs))
            self._missing += pairs.missing_a + pairs.missing_b
            self._steps += len(number_steps(pairs.of_a("step"))[0])

    def conclude(self) -> Comparison:
        """The verdict and its grounds."""
        first = self._set_limit(self.search.first)
        place = self.search.find_parting(self._floor)
        parting = self._set_limit(place)
        differences = [*find_differences(self._a, self._b, self._letter), *self._compare_formats()]
        verdict: Verdict = "different" if parting else "same within noise" if first else "identical"
        return Comparison(
            verdict=verdict,
            noise=self._floor.words,
            first=first,
            parting=parting,
            largest=self.search.largest,
            findings=tuple(self._group(differences, place, parting)) + tuple(self._compare_extent()),
            context=tuple(find_context(self._a, self._b, self._letter)),
            about=self._tell_extent(),
            letter=self._letter,
        )

    def _set_limit(self, place: Place | None) -> Divergence | None:
        return None if place is None else replace(place.told, limit=limit_at(place, self._floor))

    def _group(self, found: Sequence[Finding], place: Place | None, parting: Divergence | None) -> list[Finding]:
        """Differences that exist when the runs part, the first with its consequence; later ones as notes."""
        if parting is None or place is None:
            return [replace(each, severity="note") for each in found]
        before = [each for each in found if self._is_before(each, place)]
        after = [replace(each, severity="note") for each in found if each not in before]
        is_told = any(each.detector == "initial-parameters" for each in before)
        causes = before if is_told else [*self._tell_initial(), *before]
        looked = self._look_before(place)
        told = tell_parting(parting, self._a, self._b, looked, is_explained=bool(causes))
        if causes:
            return [replace(causes[0], causes=(told,)), *causes[1:], *after]
        return [told, *after]

    def _is_before(self, finding: Finding, place: Place) -> bool:
        """Return whether a difference existed when the runs diverged; a model's inputs exist before its outputs."""
        step = place.told.step
        if finding.detector == "precision" or (finding.step or 0) > step:
            return False
        if finding.detector != "inputs" or finding.step != step:
            return True
        model = finding.site.partition(":")[0]
        inside = (f"{model}.", f"{model}:")
        is_inside = np.array([model == ROOT or name.startswith(inside) for name in self._names], np.bool_)
        start, pairs, _ = self.search.steps[step]
        first = np.flatnonzero(is_inside[pairs.site])
        return not len(first) or bool(start + first[0] <= place.number)

    def _look_before(self, place: Place) -> Predecessors:
        """Describe the rows before this one in its step and micro-batch, in its process."""
        start, pairs, _ = self.search.steps[place.told.step]
        at = place.number - start
        before = np.arange(at)
        for name in ("micro", "rank"):
            column = pairs.of_a(name)
            before = before[column[before] == column[at]]
        gradients = pairs.of_a("backward")[before] >= 0
        knows_weights, names = self._compare_weights(place.told.step)
        return Predecessors(not len(before), not gradients.any(), knows_weights, tuple(names))

    def _tell_initial(self) -> list[Finding]:
        """Parameters that differ before the first update."""
        _, names = self._compare_weights(0)
        if not names:
            return []
        message = f"Initial parameters differ: {list_names(names)}."
        return [Finding(detector="initial-parameters", severity="warning", message=message, site=names[0], step=0)]

    def _compare_weights(self, step: int) -> tuple[bool, list[str]]:
        """Return whether updates of a step were recorded, and list the parameters whose sizes differed before."""
        if step not in self.search.steps:
            return False, []
        start, pairs, measured = self.search.steps[step]
        places = np.flatnonzero(np.array([name.endswith(".update") for name in self._names], np.bool_)[pairs.site])
        one, other = (np.sqrt(each[places]) for each in pairs.columns("reference"))
        limits = self._floor.limit(start + places, measured[places])
        apart = np.abs(one - other) > limits * np.maximum(one, other)
        return bool(len(places)), [self._names[site].removesuffix(".update") for site in pairs.site[places[apart]]]

    def _compare_formats(self) -> list[Finding]:
        """The first site whose numbers have different formats."""
        if not self._floor.is_other.any():
            return []
        one, other = self._floor.formats
        place, step = np.where(self._floor.is_other, self._floor.firsts, np.iinfo(np.int64).max)
        site = int(place.argmin())
        name, formats = self._names[site], [FORMATS[int(each[site])].name for each in (one, other)]
        message = (
            f"{name} is computed in {formats[0]} in A and in {formats[1]} in {self._letter}, and "
            f"so are {count_of(int(self._floor.is_other.sum()), 'site')} in all."
        )
        return [Finding(detector="precision", severity="note", message=message, site=name, step=int(step[site]))]

    def _compare_extent(self) -> list[Finding]:
        """Compare what only one of the runs has: steps, sites and rows."""
        found = []
        last = [each.last_step or 0 for each in (self._a, self._b)]
        if last[0] != last[1]:
            found.append(f"A was recorded up to step {last[0]}, {self._letter} up to step {last[1]}.")
        for record, run in ((self._a, "A"), (self._b, self._letter)):
            alone = len(record.history.sites) - len(self._names)
            if alone > 0:
                found.append(f"{count_of(alone, 'site')} {'was' if alone == 1 else 'were'} recorded only in {run}.")
        if self._missing:
            rows = f"{count_of(self._missing, 'row')} of sites that both have {'was' if self._missing == 1 else 'were'}"
            found.append(f"{rows} recorded in only one of them.")
        return [Finding(detector="extent", severity="note", message=each) for each in found]

    def _tell_extent(self) -> str:
        differing = self.search.differing
        sizes = f"{count_of(self.search.count, 'row')} at {count_of(len(self._names), 'site')}"
        told = [
            f"; without {missing} of {run}"
            for run, each in (("A", self._a), (self._letter, self._b))
            if (missing := each.missing())
        ]
        found = f"{differing:,} {'differs' if differing == 1 else 'differ'}"
        return f"{sizes} over {count_of(self._steps, 'step')}, {found}{''.join(told)}"
