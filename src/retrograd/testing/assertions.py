"""Assertions on a run, for tests: what is wrong with it is in the message."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from retrograd.core.errors import CallError
from retrograd.core.runs.findings import Finding, Findings
from retrograd.core.runs.reader import Given, read_history, read_run
from retrograd.core.views.findings_text import format_findings
from retrograd.explaining.comparing.comparison import compare
from retrograd.explaining.findings.explain import explain


def assert_healthy(run: Given, *, no: Collection[str] | None = None, max_grad_norm: float | None = None) -> None:
    """Assert that nothing is wrong with a run.

    Args:
        run: its folder, a run, a recording or a history.
        no: names of findings, as in ``("nan-forward", "missing-gradient")``: none of these may be found, however
            severe, and others may. Left out, nothing may be found that is more than a note.
        max_grad_norm: the largest norm that the gradient of all parameters may have, in any step and before it is
            clipped.

    Raises:
        AssertionError: it is not so, or no step was recorded; the findings are in the message.
        CallError: there is no finding of a name in ``no``.
    """
    __tracebackhide__ = True
    told = list(_list_wrong(read_run(run), None if no is None else tuple(no), max_grad_norm))
    if told:
        raise AssertionError("\n".join(told))


def assert_same(run_a: Given, run_b: Given, *, noise: Sequence[Given] = ()) -> None:
    """Assert that two runs are the same, but for noise, as :func:`retrograd.compare` measures it.

    Args:
        run_a: the folder of a run, a run, a recording or a history.
        run_b: the other one.
        noise: runs of the same program as ``run_a``, with the same seed.

    Raises:
        AssertionError: they are not; the first place where they diverge, and why, is in the message.
        CompareError: their records have nothing in common.
    """
    __tracebackhide__ = True
    comparison = compare(*map(read_run, (run_a, run_b)), noise=[read_run(each) for each in noise])
    if not comparison:
        raise AssertionError(str(comparison))


def _list_wrong(run: Given, no: Sequence[str] | None, max_grad_norm: float | None) -> Iterator[str]:
    findings = explain(run)
    if findings.unread or not findings.about:
        yield findings.headline
    if no is None:
        wrong = [each for each in findings if each.severity != "note"]
    else:
        _check_names(no, findings.asked)
        wrong = [each for each in _walk(findings) if each.detector in no]
    if wrong:
        yield format_findings(Findings(wrong, about=findings.about), every=True, verbose=True)
    if max_grad_norm is not None:
        yield from _list_large(run, max_grad_norm)


def _check_names(names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            repair = f"did you mean {near[0]!r}?" if near else "the findings that there are stand in docs/findings.md."
            raise CallError(f"There is no finding {name!r}.", repair=repair)


def _walk(findings: Iterable[Finding]) -> Iterator[Finding]:
    """All findings, also those that others explain."""
    for finding in findings:
        yield finding
        yield from _walk(finding.causes)


def _list_large(run: Given, most: float) -> Iterator[str]:
    """The first step whose gradient is larger, and the largest of all; one that is not a number is larger."""
    curve = read_history(run).scalars.get("grad_norm")
    if curve is None or not len(curve):
        yield f"max_grad_norm={most:g}: no norm of gradients was recorded"
        return
    above = np.flatnonzero(~(curve.values <= most))
    if len(above):
        first, largest = above[0], above[np.argmax(np.nan_to_num(curve.values[above], nan=np.inf))]
        yield (
            f"max_grad_norm={most:g}: the gradient's norm is {curve.values[first]:.4g} at step {curve.steps[first]:,}, "
            f"and {curve.values[largest]:.4g} at most, at step {curve.steps[largest]:,}; "
            f"above in {len(above):,} of {len(curve):,} steps"
        )
