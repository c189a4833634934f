"""Findings and plans of recordings, in a notebook."""

from __future__ import annotations

from retrograd.core.recording.settings import RecordingPlan
from retrograd.core.runs.findings import Finding, Findings, Severity, list_grounds, list_place, tell_repair
from retrograd.core.views.notebook.page import NotebookPage, escape
from retrograd.core.views.terminal import make_table

_SIDES: dict[Severity, str] = {"critical": "#d9534f", "warning": "#b07d00", "note": "#2391ad"}


def draw_recording_plan(plan: RecordingPlan) -> str:
    """The sites that would be recorded, and what they take."""
    page = NotebookPage()
    page.console.print(plan.total, style="bold")
    columns = {"site": "name", "module": "text", "elements": "number", "kept": "text"}
    page.console.print(make_table(page.console, columns, [site.describe() for site in plan.sites]))
    return page.as_html()


def draw_findings(findings: Findings) -> str:
    """Each finding with its place, and its grounds folded away."""
    page = NotebookPage()
    page.console.print(findings.headline)
    items = "".join(map(_draw_finding, findings))
    if items:
        page.console.add(f'<ol style="padding-left:1.5em">{items}</ol>')
    return page.as_html()


def _draw_finding(finding: Finding) -> str:
    place = " · ".join((*list_place(finding), finding.detector))
    grounds = [*([("to do", tell_repair(finding))] if finding.repair else []), *list_grounds(finding)]
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in grounds)
    return (
        f'<li style="border-left:3px solid {_SIDES[finding.severity]};padding-left:.6em;margin:.4em 0">'
        f"<b>{escape(finding.severity)}</b> {escape(finding.message)}<br><small>{escape(place)}</small>"
        f"<details><summary>evidence</summary><dl>{lines}</dl></details></li>"
    )
