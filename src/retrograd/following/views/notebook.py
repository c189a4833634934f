"""Traces and graphs, in a notebook."""

from __future__ import annotations

from retrograd.core.views.notebook.page import NotebookPage
from retrograd.following.graph.graph import Graph
from retrograd.following.tracing.trace import Trace
from retrograd.following.views.graph_text import print_graph
from retrograd.following.views.trace_text import print_trace

_MOST_NODES = 20_000
"""Of a larger graph no tree is drawn: that takes seconds."""


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
