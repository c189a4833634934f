"""A trace as it happens: a line for each node that has finished.

Loads no rich: that draws random numbers when it is loaded, and a script that is traced loads it at its own time.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

from retrograd.core.amounts import show_bytes
from retrograd.core.foreign.text import show_plainly
from retrograd.core.notices import print_text
from retrograd.following.graph.node import shorten_line
from retrograd.following.tracing.trace import NodeEvent
from retrograd.following.views.trace_events import largest, make_filter, print_flow, print_norm


def format_event(event: NodeEvent) -> str:
    """One line for a node that has run: time, place, shapes, what was measured, source line.

    Returns:
        As in ``"   0.132 ms  blocks.3:SoftmaxBackward0  float32[4, 8] → float32[4, 8]  model.py:30"``.
    """
    parts = [f"{(event.end - event.begin) / 1e6:8.3f} ms", event.place, print_flow(event)]
    norms = [print_norm(largest(norms)) for norms in (event.norms_in, event.norms_out) if norms]
    if set(norms) - {"-"}:
        parts.append(f"norm {' → '.join(norms)}")
    if event.memory is not None:
        parts.append(show_bytes(event.memory, signed=True))
    parts.append(shorten_line(event.line))
    if event.raised:
        parts.append("RAISED")
    return "  ".join(part for part in parts if part)


class LiveLines:
    """Prints each finished node, for ``rg.trace(live=rg.LiveLines("blocks.3*"))``.

    Args:
        pattern: a glob; only nodes whose place, kind, module or parameter it fits are printed.
        file: where to; ``sys.stderr``, as it is at that moment, when left out.
        prefix: what each line begins with, as in ``"rank 1 "``.
    """

    def __init__(self, pattern: str | None = None, file: TextIO | None = None, prefix: str = "") -> None:
        self._wants = make_filter(pattern)
        self._file = file
        self._prefix = prefix

    def __call__(self, event: NodeEvent) -> None:
        file = sys.stderr if self._file is None else self._file
        if file is None or not self._wants(event):
            return
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more, which is no reason to stop training
            print_text(show_plainly(f"{self._prefix}{format_event(event)}", keep=""), file=file)
