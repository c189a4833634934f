"""A run that is being recorded, in the terminal: redrawn where somebody looks, a line a flush for a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import sleep
from typing import TextIO

import numpy as np
from rich.console import Console, Group
from rich.text import Text

from retrograd.core.history.history import History
from retrograd.core.history.scalar_names import LOSS, STEP_TIME
from retrograd.core.limits import LIMITS
from retrograd.core.runs.findings import explain_run, read_findings
from retrograd.core.runs.reader import Run
from retrograd.core.views.downsample import FloatArray
from retrograd.core.views.findings_text import list_findings
from retrograd.core.views.shown import find_phase
from retrograd.core.views.terminal import (
    BLOCKS,
    PLAIN_BLOCKS,
    can_print,
    draw_sparkline,
    make_table,
    open_console,
    print_loss,
    print_number,
    print_quantity,
    show_frames,
)

_SPAN = 50
"""Steps over which a change is shown."""

_MOST_SITES = 8
_WIDTH = 40


@dataclass(frozen=True, slots=True)
class RunGlance:
    """What is shown of a run at one moment.

    Attributes:
        status: how it fares.
        step: the last step; None before the first.
        rate: steps a second, over the last steps; NaN where that is not known.
        loss: of each step.
        findings: the lines of what was found so far.
        newest: the newest numbers of other scalars, by name.
        changed: sites whose rms changed most, with what it is and how many times that of some steps before.
    """

    status: str
    step: int | None
    rate: float
    loss: FloatArray
    findings: list[str]
    newest: dict[str, str]
    changed: list[tuple[str, float, float]]


def follow_run(run: Run, *, file: TextIO | None = None) -> None:
    """Show a run until it is over, or somebody interrupts.

    Args:
        run: it.
        file: where to print; standard output when left out.

    Raises:
        DamagedRunError: a file of it cannot be read.
    """
    console = open_console(file)
    glances = _look_again(run)
    show_frames(console, (_draw(console, each) if console.is_terminal else describe_glance(each) for each in glances))


def _look_again(run: Run) -> Iterator[RunGlance]:
    """A glance at each thing that is new, the last one once the run is over."""
    seen: tuple[int, str] | None = None
    while True:
        now = (run.history.all_events.count + run.history.rows.count, run.status)
        if now != seen:
            seen = now
            yield glance_at(run)
        if run.status != "running":
            return
        sleep(LIMITS.flush_seconds)
        run.refresh()


def glance_at(record: Run | History) -> RunGlance:
    """What is shown of a run as it was read, or of a history in memory. No random number is drawn."""
    history = record.history if isinstance(record, Run) else record
    curve, limits = history.loss, history.rows.step_limits
    findings = explain_run(record) if history.rows.count <= LIMITS.explained_rows else read_findings(record)
    last = max([int(curve.steps[-1])] if len(curve.steps) else [], default=limits[1] if limits else None)
    scalars = history.since(max((last or 0) - _SPAN, 0)).scalars
    time = scalars.get(STEP_TIME)
    return RunGlance(
        status=str(history.manifest.get("status", "running")),
        step=last,
        rate=float("nan") if time is None or not len(time.values) else 1.0 / max(float(time.values.mean()), 1e-9),
        loss=curve.values,
        findings=list_findings(findings),
        newest={
            name: print_quantity(value, scalars.about(name).unit)
            for name, value in scalars.last.items()
            if name != LOSS
        },
        changed=_find_changes(history, last),
    )


def _find_changes(history: History, last: int | None) -> list[tuple[str, float, float]]:
    if last is None or history.rows.count == 0:
        return []
    recent = history.since(max(last - _SPAN, 0))
    matrix = recent.matrix("rms", phase=find_phase(recent))
    known = matrix.values[:, matrix.steps >= last - _SPAN]
    if known.shape[1] < 2:
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = known[:, -1] / known[:, 0]
        sizes = np.abs(np.log2(ratios))
    order = [row for row in np.argsort(-np.nan_to_num(sizes, nan=-1.0)) if sizes[row] > 0][:_MOST_SITES]
    return [(matrix.sites[row], float(known[row, -1]), float(ratios[row])) for row in order]


def describe_glance(glance: RunGlance) -> str:
    """A glance as one line."""
    found = f", {glance.findings[0].strip()}" if glance.findings else ""
    return f"{describe_progress(glance)}, loss {_print_last(glance.loss)}{found}"


def describe_progress(glance: RunGlance) -> str:
    """How it fares, the last step, and the rate."""
    rate = "" if np.isnan(glance.rate) else f", {glance.rate:.3g} steps/s"
    step = "no step yet" if glance.step is None else f"step {glance.step:,}"
    return f"{glance.status}, {step}{rate}"


def _print_last(losses: FloatArray) -> str:
    return print_loss(float(losses[-1])) if len(losses) else "not known"


def list_lines(glance: RunGlance, blocks: str = BLOCKS) -> list[str]:
    """The loss as a curve, the newest of other scalars, and what was found.

    Args:
        glance: it.
        blocks: of which the curve is made.
    """
    curve = [f"loss {draw_sparkline(glance.loss, _WIDTH, blocks=blocks)} {_print_last(glance.loss)}"]
    newest = "  ".join(f"{name} {value}" for name, value in glance.newest.items())
    none = "no findings so far" if glance.status == "running" else "no findings"
    return [*(curve if len(glance.loss) else ()), *([newest] if newest else ()), *(glance.findings or [none])]


CHANGES = {"changed most": "name", "rms": "number", f"over {_SPAN} steps": "number"}
"""Columns of the table of sites that changed most."""


def list_changes(glance: RunGlance) -> list[tuple[str, str, str]]:
    """Its rows."""
    return [(site, print_number(value), f"x {print_number(ratio)}") for site, value, ratio in glance.changed]


def _draw(console: Console, glance: RunGlance) -> Group:
    blocks = BLOCKS if can_print(console, BLOCKS) else PLAIN_BLOCKS
    parts: list[object] = [Text(describe_progress(glance), style="bold"), *map(Text, list_lines(glance, blocks))]
    if glance.changed:
        parts.append(make_table(console, CHANGES, list_changes(glance)))
    return Group(*parts)  # type: ignore[arg-type]  # texts and a table
