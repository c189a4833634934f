"""Graphs that grow from step to step, graphs that are kept, and what is carried over with its graph."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from retrograd.core.amounts import count_of
from retrograd.core.groups import gather
from retrograd.core.history.facts import Call, GraphSize, Operation
from retrograd.core.runs.findings import Finding, shorten_line
from retrograd.explaining.findings.chain import Chain, tensor_of
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.record import CannotTell, Record

family = Family(__name__)

FEWEST = 4
"""Samples that make a trend; our own choice."""


def list_sizes(record: Record) -> list[GraphSize]:
    """The size of the graph at the first backward pass of each look.

    Raises:
        CannotTell: there are too few looks to see a trend.
    """
    first: dict[int, GraphSize] = {}
    for each in record.of(GraphSize):
        first.setdefault(each.step, each)
    if len(first) < FEWEST:
        raise CannotTell(f"the graph was measured at {count_of(len(first), 'step')}; a trend needs {FEWEST}")
    return [first[step] for step in sorted(first)]


def find_pass(record: Record, step: int) -> Call | None:
    """The first backward pass from a step on."""
    return next((call for call in record.called("backward") if call.step >= step), None)


def _list_passes(record: Record) -> list[GraphSize]:
    """The sizes at the passes of a step, where each step has the same ones, all from one line; else none."""
    by_step = gather((each.step, each) for each in record.of(GraphSize))
    lines = {call.line for call in record.called("backward")}
    alike = {tuple(each.value for each in passes) for passes in by_step.values()}
    passes = next(iter(by_step.values()), [])
    return passes if len(passes) >= FEWEST and len(lines) == len(alike) == 1 and len(by_step) > 1 else []


def _find_slope(looks: list[GraphSize], by: str) -> float | None:
    """Nodes by which the graph grows each time; None where it does not rise, threefold and in a straight line."""
    times = np.array([getattr(each.moment, by) for each in looks], np.float64)
    nodes = np.array([each.value for each in looks], np.float64)
    if not (np.diff(nodes[1:]) > 0).all() or not nodes[-1] > 3 * nodes[0]:
        return None
    slope, begin = np.polyfit(times, nodes, 1)
    return float(slope) if np.abs(nodes - (begin + slope * times)).max() <= 0.1 * nodes[-1] else None


def _describe_when(look: GraphSize, *, is_within: bool) -> str:
    return f"in pass {look.moment.micro} of step {look.step}" if is_within else f"at step {look.step}"


@family.detector("graph-grows")
def graph_grows(record: Record, entry: Entry) -> Iterator[Finding]:
    """Each step's graph holds those of all steps before."""
    within = _list_passes(record)
    looks = within or list_sizes(record)
    slope = _find_slope(looks, "micro" if within else "step")
    if slope is None:
        return
    nodes = [each.value for each in looks]
    call = find_pass(record, looks[1].step)
    later = [chain for chain in record.chains if chain.step >= looks[1].step]
    state = next((found for chain in later if (found := tell_carried(record, chain))), None)
    yield entry.finding(
        f"The graph grows by {slope:.0f} nodes a {'pass' if within else 'step'}: backward ran through "
        f"{nodes[0]:.0f} nodes {_describe_when(looks[0], is_within=bool(within))} and {nodes[-1]:.0f} "
        f"{_describe_when(looks[-1], is_within=bool(within))}, so something is carried over without detach"
        f"{f': {state[0]}' if state else ''}",
        step=looks[1].step,
        last_step=looks[-1].step,
        line=state[1] if state else call.line if call else "",
        evidence=[
            ("nodes at the last look, by those at the first", float(nodes[-1] / nodes[0]), "> 3"),
            ("nodes more each time", float(slope), "> 0"),
        ],
    )


@family.detector("graph-leaks")
def graph_leaks(record: Record, entry: Entry) -> Iterator[Finding]:
    """Graphs of earlier steps are kept."""
    looks = list_sizes(record)
    end = _find_end(record, looks)
    if end is None:
        if looks[-1].ring and max(each.parts for each in looks) > 1:
            yield _describe_ring(entry, looks)
        elif _are_parts_kept(looks):
            yield _describe_parts(entry, record, looks)
        return
    released = "" if end is looks[-1] else " until they are let go"
    first = next(each for each in looks if each.alive)
    made = next((line for chain in record.chains if (line := _find_loss_line(record, chain))), "")
    where = f"; the loss is made in {shorten_line(made)}" if made else ""
    call = find_pass(record, first.step)
    holder, stored = _find_holder(looks)
    yield entry.finding(
        f"Graphs are kept: {end.alive} graphs of earlier steps are still held at step {end.step}{holder}, so memory "
        f"grows with every step{released}{where}",
        step=first.step,
        last_step=end.step,
        line=stored or made or (call.line if call else ""),
        evidence=[("graphs of earlier steps that are held", end.alive, "≥ 8, and rising")],
    )


def _describe_parts(entry: Entry, record: Record, looks: list[GraphSize]) -> Finding:
    end = looks[-1]
    first = next(each for each in looks if each.parts)
    known = next((each for each in reversed(looks) if each.line), end)
    place = f" in {known.module}" if known.module else ""
    line = f" ({shorten_line(known.line)})" if known.line else ""
    what = f"what `{known.held}` made{place}{line}"
    call = find_pass(record, first.step)
    holder, stored = _find_holder(looks)
    return entry.finding(
        f"Graphs are kept in part: of {end.parts} of the {end.looks} earlier graphs that were looked at, {what} is "
        f"still held at step {end.step}{holder}, so memory grows with every step",
        case="parts",
        site=known.module,
        step=first.step,
        last_step=end.step,
        line=stored or known.line or (call.line if call else ""),
        evidence=[("earlier graphs of which a part is held", end.parts, f"≥ {end.looks - 2}, ≥ 8")],
    )


def _find_holder(looks: list[GraphSize]) -> tuple[str, str]:
    """The variable that holds them, in words, and the line that stores there; both are empty if it was not found."""
    known = next((each for each in reversed(looks) if each.variable), None)
    if known is None:
        return "", ""
    where = f" ({shorten_line(known.stored)})" if known.stored else ""
    return f" by `{known.variable}`{where}", known.stored


def _describe_ring(entry: Entry, looks: list[GraphSize]) -> Finding:
    known = next((each for each in looks if each.ring_line), looks[-1])
    name, _, attribute = known.ring.rpartition(".")
    where = f" ({shorten_line(known.ring_line)})" if known.ring_line else ""
    return entry.finding(
        f"{name}{where} keeps its output as ctx.{attribute}, and the output keeps ctx: neither is freed with the "
        "step, but when Python's garbage collector comes by, which does not know how much memory that is",
        case="ring",
        step=known.step,
        last_step=looks[-1].step,
        line=known.ring_line,
        evidence=[("attribute of ctx", f"ctx.{attribute}", "has the node itself as its grad_fn")],
    )


def _are_parts_kept(looks: list[GraphSize]) -> bool:
    """Check whether a part of all graphs is held, but for two, at each of the last looks."""
    last = looks[-3:]
    return looks[-1].parts >= 8 and all(each.parts >= each.looks - 2 for each in last)


def _find_end(record: Record, looks: list[GraphSize]) -> GraphSize | None:
    """The last look at which graphs were kept, one for each step; None where they were not.

    At the end of the record; or before all were let go at once, as those of an epoch are.
    """
    alive = [each.alive for each in looks]
    if alive[-1] >= 8 and alive[-3] < alive[-2] < alive[-1]:
        before = sum(1 for step in record.steps if step < looks[-1].step)
        return looks[-1] if alive[-1] >= 0.5 * before else None
    kept = [each for place, each in enumerate(looks) if alive[: place + 1] == [one.step for one in looks[: place + 1]]]
    is_released = bool(kept) and min(alive[len(kept) :], default=8) < 8
    return kept[-1] if is_released and kept[-1].alive >= 8 else None


def _find_loss_line(record: Record, chain: Chain) -> str:
    """Where the program computes what backward begins from; empty where that is inside of a module, or not known."""
    root = record.root_of(chain)
    return chain.listed[root].line if root >= 0 and not chain.listed[root].module else ""


# ---- carried over to the next step ----


def tell_carried(record: Record, chain: Chain) -> tuple[str, str] | None:
    """The first operation that takes a tensor with a graph that was made before all of them.

    Returns:
        That as a sentence, and the line at which it is handed in: that of the model's call, where the model was called
        with such a tensor or returns one. None where there is no such tensor.
    """
    if not chain.carried:
        return None
    operation, taken = chain.carried[0]
    given = {tensor_of(each) for looks in record.inputs.values() for each in looks}
    given |= {made for number in chain.outputs for made in chain.listed[number].makes}
    calls = [each.line for each in record.called("forward") if each.step == chain.step]
    is_given = operation.module and taken in given and calls
    return tell_taken(operation, taken), calls[-1] if is_given else operation.line


def tell_taken(operation: Operation, taken: str) -> str:
    """Describe which operation takes what."""
    where = f" ({shorten_line(operation.line)})" if operation.line else ""
    return f"`{operation.name}`{where} takes {taken} that was made before this forward"
