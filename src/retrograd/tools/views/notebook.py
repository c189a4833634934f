"""Checks of adjoints, in a notebook."""

from __future__ import annotations

from retrograd.core.views.notebook.page import NotebookPage
from retrograd.core.views.terminal import make_table, print_number
from retrograd.tools.adjoint.adjoint_check import AdjointCheck, describe_faults


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
