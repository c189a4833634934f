"""Graphs that grow from step to step, and graphs that are kept."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from retrograd.findings.carried import tell_carried
from retrograd.findings.chain import Chain
from retrograd.findings.detector import CannotTell, Detector, Words
from retrograd.findings.detectors.zero_grad import find_root
from retrograd.findings.finding import Evidence, Finding, shorten_line
from retrograd.findings.record import Record
from retrograd.history.facts import Call, GraphSize

FEWEST = 4
"""Looks that make a trend; our own choice."""


def list_sizes(record: Record) -> list[GraphSize]:
    """The size of the graph at the first backward pass of each look.

    Raises:
        CannotTell: there are too few looks to see a trend.
    """
    first: dict[int, GraphSize] = {}
    for each in record.of(GraphSize):
        first.setdefault(each.step, each)
    if len(first) < FEWEST:
        raise CannotTell(f"the graph was measured at {len(first)} steps; a trend needs {FEWEST}")
    return [first[step] for step in sorted(first)]


def find_pass(record: Record, step: int) -> Call | None:
    """The first backward pass from a step on."""
    return next((call for call in record.calls if call.name == "backward" and call.step >= step), None)


class GraphGrows(Detector):
    """Each step's graph holds those of all steps before."""

    slug = "graph-grows"
    words = Words(
        says="The graph that backward runs through grows with every step, so something is carried over without detach.",
        example="The graph grows by 5 nodes a step: backward ran through 9 nodes at step 0 and 329 at step 64.",
        threshold="nodes rise at each of at least 4 looks, to 3 times their first number, and lie within 10 % of a "
        "straight line",
        source="our own choice",
        guard="sequences of different lengths do not grow with the step number",
        repair="detach what is carried over (hidden state, running loss) before it is used in the next step.",
    )
    explains = (
        "graph-leaks",
        "exploding",
        "vanishing",
        "loss-noisy",
        "diverged",
        "freed-graph",
    )

    def check(self, record: Record) -> Iterator[Finding]:
        """See :class:`Detector`."""
        looks = list_sizes(record)
        steps = np.array([each.step for each in looks], np.float64)
        nodes = np.array([each.value for each in looks], np.float64)
        if not (np.diff(nodes[1:]) > 0).all() or not nodes[-1] > 3 * nodes[0]:
            return
        slope, begin = np.polyfit(steps, nodes, 1)
        if np.abs(nodes - (begin + slope * steps)).max() > 0.1 * nodes[-1]:
            return
        call = find_pass(record, looks[1].step)
        later = [chain for chain in record.chains if chain.step >= looks[1].step]
        state = next((found for chain in later if (found := tell_carried(record, chain))), None)
        yield self.find(
            "critical",
            f"The graph grows by {slope:.0f} nodes a step: backward ran through {nodes[0]:.0f} nodes at step "
            f"{steps[0]:.0f} and {nodes[-1]:.0f} at step {steps[-1]:.0f}, so something is carried over without detach"
            f"{f': {state[0]}' if state else ''}",
            step=looks[1].step,
            last_step=looks[-1].step,
            line=state[1] if state else call.line if call else "",
            evidence=[
                Evidence("nodes at the last look, by those at the first", float(nodes[-1] / nodes[0]), "> 3"),
                Evidence("nodes a step", float(slope), "> 0"),
            ],
            precondition=["the number of nodes rises in a straight line with the step"],
            refute="each step is meant to differentiate through all steps before",
        )


class GraphLeaks(Detector):
    """Graphs of earlier steps are kept."""

    slug = "graph-leaks"
    words = Words(
        says="Losses or outputs are kept with their graphs, so memory grows with every step.",
        example="Graphs are kept: 64 graphs of earlier steps are still held at step 64, one more at each step.",
        threshold="graphs of earlier steps that are held, rising at each of the last 3 looks to at least 8",
        source="our own choice",
        guard="a fixed number of graphs that are held (truncated backpropagation, replay) does not rise",
        repair="keep loss.item() or loss.detach() in place of the loss.",
    )

    def check(self, record: Record) -> Iterator[Finding]:
        """See :class:`Detector`."""
        looks = list_sizes(record)
        alive = [each.alive for each in looks]
        if alive[-1] < 8 or not alive[-3] < alive[-2] < alive[-1]:
            return
        if alive[-1] < 0.5 * (len([s for s in record.steps if s < looks[-1].step])):
            return
        first = next(each for each in looks if each.alive)
        made = next((line for chain in record.chains if (line := _find_loss_line(record, chain))), "")
        call = find_pass(record, first.step)
        yield self.find(
            "warning",
            f"Graphs are kept: {alive[-1]} graphs of earlier steps are still held at step {looks[-1].step}, so memory "
            f"grows with every step{f'; the loss is made in {shorten_line(made)}' if made else ''}",
            step=first.step,
            last_step=looks[-1].step,
            line=made or (call.line if call else ""),
            evidence=[Evidence("graphs of earlier steps that are held", alive[-1], "≥ 8, and rising")],
            precondition=["their number rises from look to look"],
            refute="a later backward pass runs through them",
        )


def _find_loss_line(record: Record, chain: Chain) -> str:
    """Where the program computes what backward begins from; empty where that is inside of a module, or not known."""
    root = find_root(record, chain)
    return chain.listed[root].line if root >= 0 and not chain.listed[root].module else ""
