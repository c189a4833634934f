"""Inventories and budgets, in a notebook."""

from __future__ import annotations

from retrograd.core.amounts import show_bytes
from retrograd.core.views.notebook.page import NotebookPage
from retrograd.core.views.terminal import make_table
from retrograd.memory.budget.plan import Plan
from retrograd.memory.inventory.inventory import Inventory
from retrograd.memory.views.inventory_table import print_inventory


def draw_inventory(inventory: Inventory) -> str:
    """What is held by module, and at the peak."""
    page = NotebookPage()
    print_inventory(inventory, file=page)
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
