"""A run as the page of its report asks for it: what it shows, which of that is new, and numbers from a column on.

Numbers are read when they are asked for, from the part files that hold them, and nothing of them is kept: however long
a run is, and however many pages follow it, memory holds what one answer takes.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from retrograd.core.errors import DamagedRunError, RunError
from retrograd.core.history.history import History
from retrograd.core.history.ungraded import list_ungraded
from retrograd.core.limits import LIMITS
from retrograd.core.runs.findings import Explained, explain_for_page, read_findings
from retrograd.core.runs.reader import Run, open_run
from retrograd.core.sites.site import parse_leniently
from retrograd.core.views.downsample import ColumnBands, FloatArray, StepColumns, share_columns
from retrograd.core.views.report.blocks import (
    Block,
    Blocks,
    Measure,
    choose_bands,
    describe_measure,
    list_measures,
    make_exponent_block,
)
from retrograd.core.views.report.facts import (
    describe_data,
    describe_recorded,
    describe_run,
    list_modules,
    list_troubles,
)
from retrograd.core.views.report.findings import describe_card, describe_findings, find_first_nonfinite
from retrograd.core.views.report.report import frame_report
from retrograd.core.views.report.scalars import ScalarCurves
from retrograd.core.views.report.scope import Scope, choose_scope
from retrograd.core.views.shown import add_ungraded, describe_ungraded, group_places

_NOT_LOOKED = "Not looked for yet; `retrograd explain` does."
Answer = TypeVar("Answer")


class NotServedError(LookupError):
    """What was asked for is not there."""


class TooMuchError(ValueError):
    """More was asked for than one answer holds."""


class OtherSitesError(LookupError):
    """Numbers of sites that were asked for mean others by now; the page learns of them with the next news."""


class ColumnRange(NamedTuple):
    """Columns that are asked for.

    Attributes:
        step: the first step.
        until: the last one.
        width: how many steps share a column.
    """

    step: int
    until: int
    width: int


class ChosenSites(NamedTuple):
    """Sites that are asked for.

    Attributes:
        series: their numbers.
        sites: the digest of the sites that the page knows, by which it numbers them.
    """

    series: Sequence[int]
    sites: str


class FollowedRun:
    """A run that pages follow; called from several threads.

    Args:
        path: its folder.

    Raises:
        NotARunError, DamagedRunError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._run: Run = open_run(path)
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._resumed: object = None
        self._scope: Scope | None = None
        self._curves = ScalarCurves(History())
        self._curves_of, self._curves_read, self._curves_took = 0, 0.0, 0.0
        self._nonfinite: dict[str, Any] | None = None
        self._known = Explained(read_findings(self._run))
        self._explaining: threading.Thread | None = None
        self._explained, self._took, self._seen = 0.0, 0.0, -1
        self._extend()

    def make_page(self, base: str, home: str = "") -> str:
        """The page of the report, without numbers, which it asks for at an address; ``home`` is that of all runs."""
        with self._lock:
            self._look()
            scope = replace(self._scoped, columns=share_columns(self._scoped.columns.steps, LIMITS.page_columns))
            facts, idle = self._describe(scope), self._find_idle()
        live = {
            "idle": idle,
            "base": base,
            "home": home,
            "pause": round(1000 * LIMITS.flush_seconds),
            "version": 0,
            "digests": _digest(_leave_columns_out(facts)),
        }
        return frame_report({**facts, "live": live}, {}, is_served=True)

    def find_news(self, have: dict[str, str], column: int, step: int, until: int, width: int) -> dict[str, Any]:
        """What a page lacks.

        Args:
            have: the digests of facts that it has.
            column: its last column, which may have grown.
            step: the first step of that column.
            until: the last step that it has.
            width: how many steps share a column of its.

        Returns:
            ``news``, facts that differ; their ``digests``; ``columns`` from the first one on that differs, or None.
        """
        with self._lock:
            self._look()
            steps = self._scoped.columns.steps
            columns = StepColumns(steps, width)
            is_there = int(np.searchsorted(steps, step)) == column * width < len(steps)  # a resumed run begins earlier
            fits = is_there and len(columns) <= 2 * LIMITS.page_columns
            if not fits:
                column, columns = 0, share_columns(steps, LIMITS.page_columns)
            facts = _leave_columns_out(self._describe(replace(self._scoped, columns=columns)))
        digests = _digest(facts)
        changed = {name: digest for name, digest in digests.items() if have.get(name) != digest}
        is_same = fits and len(steps) and int(steps[-1]) == until
        told = {
            "from": column,
            "first": columns.first[column:].tolist(),
            "last": columns.last[column:].tolist(),
            "width": columns.width,
            "total": len(steps),
        }
        return {
            "news": {name: facts[name] for name in changed},
            "digests": changed,
            "columns": None if is_same or not len(steps) else told,
            "idle": self._find_idle(),
        }

    def _find_idle(self) -> float | None:
        """Seconds since the last event, or the start; None where nothing goes on, or that is not known of a copy."""
        is_copy = any(rank.facts.get("copied") for rank in self._run.ranks)
        if self._run.status != "running" or is_copy:
            return None
        moments = [rank.facts["began"] for rank in self._run.ranks if "began" in rank.facts]
        moments += self._run.history.all_events.times or ()
        return max(0.0, time.time() - max(moments)) if moments else None

    def read_scalars(self, names: Sequence[str], columns: ColumnRange) -> bytes:
        """Scalars of some columns and the clock, as float32 of shape (3, names + 1, columns).

        Nothing where there are new ones that are not read yet: the page asks again with the next news.

        Raises:
            TooMuchError: that would be more than an answer holds.
            DamagedRunError: a file cannot be read.
        """
        with self._lock:
            self._read_curves()
            steps = self._scoped.columns.steps
            begin, end = np.searchsorted(steps, columns.step), np.searchsorted(steps, columns.until, side="right")
            _check_size((len(names) + 1) * int(end - begin) // max(columns.width, 1))
            if self._curves_of != self._run.history.all_events.count:
                return b""
            first = columns.step if begin else None
            return _pack(self._curves.reduce(list(names), StepColumns(steps[begin:end], max(columns.width, 1)), first))

    def _read_curves(self) -> None:
        """Read all scalars again where there are new events and it takes a small share of the time.

        A rate is noted when it changes and a step is timed from the one before, so no part can be read alone.
        """
        count, now = self._run.history.all_events.count, time.monotonic()
        if count == self._curves_of or now - self._curves_read < self._curves_took / LIMITS.look_share:
            return
        try:
            found = ScalarCurves(self._run.history)
        except DamagedRunError:  # a file was merged meanwhile
            self._run.refresh()
            count, found = self._run.history.all_events.count, ScalarCurves(self._run.history)
        self._curves, self._curves_of = found, count
        self._curves_read = time.monotonic()
        self._curves_took = self._curves_read - now

    def read_numbers(self, names: Sequence[str], chosen: ChosenSites, columns: ColumnRange) -> bytes:
        """Statistics of some series, read together: for each of them float32 of shape (bands, series, columns).

        Raises:
            NotServedError: there is no such statistic.
            OtherSitesError: the run has other sites by now.
            TooMuchError: that would be more than an answer holds.
            DamagedRunError: a file cannot be read.
        """
        return self._read(lambda scope: _pack_numbers(names, _choose(scope, chosen)), columns)

    def read_exponents(self, chosen: ChosenSites, columns: ColumnRange) -> dict[str, Any]:
        """The histograms of some series, as the page reads them: numbered as they are asked for.

        Raises:
            OtherSitesError: the run has other sites by now.
            TooMuchError: that would be more than an answer holds.
            DamagedRunError: a file cannot be read.
        """
        return self._read(lambda scope: _describe_exponents(_choose(scope, chosen)), columns)

    def _read(self, read: Callable[[Scope], Answer], columns: ColumnRange) -> Answer:
        """Read numbers of some steps, while others may take in new files; what is merged meanwhile is read there."""
        with self._lock:
            scope = self._cut(columns)
        try:
            return read(scope)
        except DamagedRunError:
            with self._lock:
                self._take_in()
                scope = self._cut(columns)
            return read(scope)

    # ---- what there is ----

    @property
    def _scoped(self) -> Scope:
        assert self._scope is not None  # found when it was opened
        return self._scope

    def _look(self) -> None:
        """Read what has been written since, at most once a second."""
        now = time.monotonic()
        if now - self._looked < LIMITS.page_look_seconds:
            return
        self._take_in()
        self._explain_again()

    def _take_in(self) -> None:
        """Read what has been written since."""
        self._looked = time.monotonic()
        self._run.refresh()
        self._extend()

    def _extend(self) -> None:
        """Take new steps and sites into the scope; a run that was resumed is looked at anew."""
        history = self._run.history
        known, resumed = self._scope, history.manifest.get("resumed")
        if known is None or len(known.columns.steps) == 0 or resumed != self._resumed:
            self._resumed = resumed
            self._scope = _open_scope(history)
            self._nonfinite = find_first_nonfinite(self._scope, group_places(self._scope.sites))
            return
        last = int(known.columns.steps[-1])
        later = choose_scope(history.since(last), known.phase, 1 << 62, float("inf"))
        elements = dict(zip(known.sites, known.elements, strict=True))
        for site, count in zip(later.sites, later.elements, strict=True):
            elements[site] = max(count, elements.get(site, -1))
        sites = list(elements) if len(elements) == len(known.sites) else [s for s in history.sites if s in elements]
        self._scope = replace(
            known,
            sites=sites,
            unseen=[site for site in history.sites if site not in elements],
            elements=[elements[site] for site in sites],
            columns=StepColumns(np.union1d(known.columns.steps, later.columns.steps), 1),
        )
        if self._nonfinite is None and later.sites:
            self._nonfinite = find_first_nonfinite(later, group_places(later.sites))

    def _cut(self, columns: ColumnRange) -> Scope:
        """The scope from one step to another."""
        steps = self._scoped.columns.steps
        begin, end = np.searchsorted(steps, columns.step), np.searchsorted(steps, columns.until, side="right")
        history = self._run.history.since(columns.step)
        return replace(self._scoped, history=history, columns=StepColumns(steps[begin:end], max(columns.width, 1)))

    def _describe(self, scope: Scope) -> dict[str, Any]:
        """All that the page tells, besides numbers."""
        run, manifest = self._run, scope.history.manifest
        told = describe_ungraded(run.history, self._known.reasons, is_running=run.status == "running")
        places = add_ungraded(group_places(scope.sites), told, manifest)
        statistics = [
            Block(
                each.name, describe_measure(each, choose_bands(each, scope.columns), series, is_signed=each.signed), ""
            )
            for each in list_measures(manifest)
            if (series := _series_of(each, scope.sites))
        ]
        self._read_curves()
        scalars = None if self._curves.facts is None else Block("scalars", self._curves.facts, "")
        return {
            **describe_run(run, scope),
            **describe_data(scope, places, Blocks(statistics, scalars, None)),
            "exponents": None,
            "card": describe_card(self._known.card),
            "findings": {**describe_findings(self._known.findings, scope, places), **self._tell_pending()},
            "nonfinite": self._nonfinite,
            "recorded": describe_recorded(scope, places),
            "troubles": list_troubles(manifest, scope.history.few_events, run.ranks, scope.unseen, places, run.damaged),
            "model": list_modules(manifest.get("model")),
            "inventory": None,
        }

    # ---- findings ----

    def _tell_pending(self) -> dict[str, Any]:
        """What the page says instead where nobody has looked for findings yet, and none were kept."""
        if self._explained or len(self._known.findings):
            return {}
        is_long = self._run.history.rows.count > LIMITS.explained_rows
        return {"pending": True, "about": _NOT_LOOKED if is_long else "Looking for findings…"}

    def _explain_again(self) -> None:
        """Search for findings in a separate thread, if there are new rows and it takes a small share of the time."""
        rows, now = self._run.history.rows.count, time.monotonic()
        is_due = now - self._explained > self._took / LIMITS.look_share and rows != self._seen
        is_free = self._explaining is None or not self._explaining.is_alive()
        if rows > LIMITS.explained_rows:
            self._known = self._known._replace(findings=read_findings(self._run))
        elif is_due and is_free:
            self._seen = rows
            self._explaining = threading.Thread(target=self._explain, name="retrograd-explain", daemon=True)
            self._explaining.start()

    def _explain(self) -> None:
        begun = time.monotonic()
        try:
            run = open_run(self._run.path)  # by itself: a refresh takes files away that it reads
            known = explain_for_page(run, list_ungraded(run.history))
        except RunError:
            return  # at the next look it may be whole
        finally:
            self._explained, self._took = time.monotonic(), time.monotonic() - begun
        with self._lock:
            self._known = known


def _series_of(measure: Measure, sites: list[str]) -> list[int]:
    """Numbers of the sites that can have a statistic."""
    if measure.name != "update_ratio":
        return list(range(len(sites)))
    return [number for number, site in enumerate(sites) if parse_leniently(site).quantity == "update"]


def _open_scope(history: History) -> Scope:
    """All of a record; of a long one the elements are those of its last steps, for all others would have to be read."""
    phases = history.outline.steps
    if history.rows.count <= LIMITS.explained_rows or len(phases) > 1:
        return choose_scope(history, None, 1 << 62, float("inf"))
    [steps] = phases.values()
    last = choose_scope(history.since(int(steps[-1])), None, 1 << 62, float("inf"))
    elements = dict(zip(last.sites, last.elements, strict=True))
    listed, names = history.sites, history.site_names
    seen = {names[code] for code in history.rows.codes}
    sites = [site for site in listed if site in seen]
    unseen = [site for site in listed if site not in seen]
    counts = [elements.get(site, 0) for site in sites]
    return replace(last, history=history, sites=sites, unseen=unseen, elements=counts, columns=StepColumns(steps, 1))


def _choose(scope: Scope, chosen: ChosenSites) -> Scope:
    """The scope of some of its sites."""
    if chosen.sites != _digest({"sites": scope.sites})["sites"]:
        raise OtherSitesError
    if not all(0 <= number < len(scope.sites) for number in chosen.series):
        raise NotServedError
    return replace(scope, sites=[scope.sites[number] for number in chosen.series])


def _check_size(cells: int) -> None:
    if cells > LIMITS.answer_cells:
        raise TooMuchError


def _pack_numbers(names: Sequence[str], scope: Scope) -> bytes:
    _check_size(len(names) * len(scope.sites) * len(scope.columns))
    known = {each.name: each for each in list_measures(scope.history.manifest)}
    if not known.keys() >= set(names):
        raise NotServedError
    measures = [known[name] for name in names]
    steps = scope.columns.steps
    found = {name: ColumnBands(len(scope.sites), len(steps), scope.columns.width) for name in names}
    custom = scope.history.rows.custom  # one that was announced may never come
    there = [each.name for each in measures if not each.is_custom or each.name in custom]
    for matrices in scope.history.matrices(there, scope.sites, scope.phase) if there and len(steps) else ():
        for name, matrix in zip(there, matrices, strict=True):
            at = np.flatnonzero((matrix.steps >= steps[0]) & (matrix.steps <= steps[-1]))
            found[name].add_some(matrix.values[:, at], np.searchsorted(steps, matrix.steps[at]))
    return b"".join(
        _pack(getattr(found[each.name].bands, band)) for each in measures for band in choose_bands(each, scope.columns)
    )


def _describe_exponents(scope: Scope) -> dict[str, Any]:
    _check_size(64 * len(scope.sites) * len(scope.columns))
    block = make_exponent_block(scope)
    return {"exponents": block and block.facts, "text": block.text if block else ""}


def _pack(numbers: FloatArray) -> bytes:
    with np.errstate(over="ignore", under="ignore"):
        return numbers.astype("<f4").tobytes()


def _leave_columns_out(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != "columns"}


def _digest(facts: dict[str, Any]) -> dict[str, str]:
    """A short digest of each fact."""
    texts = {name: json.dumps(value, sort_keys=True).encode() for name, value in facts.items()}
    return {name: hashlib.sha256(text).hexdigest()[:12] for name, text in texts.items()}
