"""What is told of a finding beside its sentence: where, when, and what it rests on."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from retrograd.findings.finding import Finding


def list_place(finding: Finding) -> list[str]:
    """Where and since when: ``at blocks.3``, ``steps 40 to 59``, ``rank 1``, ``train.py:48``; what is known of it."""
    step = "" if finding.step is None else f"step {finding.step:,}"
    if finding.step is not None and finding.last_step is not None and finding.last_step > finding.step:
        step = f"steps {finding.step:,} to {finding.last_step:,}"
    rank = "" if finding.rank is None else f"rank {finding.rank}"
    return [part for part in (f"at {finding.site}" if finding.site else "", step, rank, finding.line) if part]


def tell_repair(finding: Finding) -> str:
    """What to do, as a sentence; empty where that is not known."""
    text = finding.repair.rstrip()
    return text and f"{text[0].upper()}{text[1:]}{'' if text[-1] in '.!?' else '.'}"


def list_grounds(finding: Finding) -> Iterator[tuple[str, str]]:
    """What it rests on, each under its heading."""
    yield from (("measured", str(each)) for each in finding.evidence)
    yield from (("checked", each) for each in finding.precondition)
    if finding.refute:
        yield "wrong if", finding.refute
    yield from (("explains", f"{each} [{each.detector}]") for each in finding.causes)


def draw_findings(findings: Sequence[Finding], about: str) -> str:
    """Findings as a piece of HTML for a notebook, without style of its own but for a rule at the side."""
    items = "".join(f"<li>{_draw(finding)}</li>" for finding in findings)
    return f"<div><p>{html.escape(about)}</p><ol>{items}</ol></div>"


def _draw(finding: Finding) -> str:
    place = " · ".join((*list_place(finding), finding.detector))
    grounds = [*([("to do", tell_repair(finding))] if finding.repair else []), *list_grounds(finding)]
    lines = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in grounds)
    return (
        f"<b>{html.escape(finding.severity)}</b> {html.escape(finding.message)}<br><small>{html.escape(place)}</small>"
        f"<details><summary>evidence</summary><dl>{lines}</dl></details>"
    )
