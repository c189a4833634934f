"""What was found out, in a notebook: traces, graphs, inventories, checks, findings and plans."""

from __future__ import annotations

from retrograd.core.amounts import show_bytes
from retrograd.core.recording.settings import RecordingPlan
from retrograd.core.views.notebook.page import NotebookPage, escape
from retrograd.core.views.terminal import make_table, print_number
from retrograd.explaining.findings.finding import Finding, Findings, Severity, list_grounds, list_place, tell_repair
from retrograd.following.graph.graph import Graph
from retrograd.following.tracing.trace import Trace
from retrograd.following.views.graph_text import print_graph
from retrograd.following.views.trace_text import print_trace
from retrograd.memory.budget.plan import Plan
from retrograd.memory.inventory.inventory import Inventory
from retrograd.memory.views.inventory_table import print_inventory
from retrograd.tools.adjoint.adjoint_check import AdjointCheck, describe_faults

_MOST_NODES = 20_000
"""Of a larger graph no tree is drawn: that takes seconds."""

_SIDES: dict[Severity, str] = {"critical": "#d9534f", "warning": "#b07d00", "note": "#2391ad"}


def draw_trace(trace: Trace) -> str:
    """What took most of the time."""
    page = NotebookPage()
    print_trace(trace, file=page)
    return page.as_html()


def draw_graph(graph: Graph) -> str:
    """The graph as a tree by module."""
    page = NotebookPage()
    if len(graph) > _MOST_NODES:
        page.console.print(repr(graph))
    else:
        print_graph(graph, file=page)
    return page.as_html()


def draw_inventory(inventory: Inventory) -> str:
    """What is held by module, and at the peak."""
    page = NotebookPage()
    print_inventory(inventory, file=page)
    return page.as_html()


def draw_check(check: AdjointCheck) -> str:
    """What is at fault, and all comparisons."""
    page = NotebookPage()
    page.console.print(describe_faults(check.rows, check.faults), style="bold" if check else "bold red")
    columns = {"site": "name", "difference": "number", "tolerance": "number", "verdict": "text", "": "text"}
    rows = [
        (
            str(row.site) if row.site.path == row.caller[0] else f"{row.caller_name} > {row.site}",
            print_number(row.difference),
            print_number(row.tolerance),
            row.verdict.value,
            row.reason,
        )
        for row in check.rows
    ]
    page.console.print(make_table(page.console, columns, rows))
    return page.as_html()


def draw_recording_plan(plan: RecordingPlan) -> str:
    """The sites that would be recorded, and what they take."""
    page = NotebookPage()
    page.console.print(plan.total, style="bold")
    columns = {"site": "name", "module": "text", "elements": "number", "kept": "text"}
    page.console.print(make_table(page.console, columns, [site.describe() for site in plan.sites]))
    return page.as_html()


def draw_budget_plan(plan: Plan) -> str:
    """The peak and the time that are predicted, and where memory waits."""
    page = NotebookPage()
    for line in plan.headlines():
        page.console.print(line)
    columns = {"module": "name", "kind": "text", "waits": "text", "number": "number", "bytes": "number"}
    rows = [(*key, f"{count:,}", show_bytes(nbytes)) for key, count, nbytes in plan.add_up()]
    page.console.print(make_table(page.console, columns, rows))
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
