"""Tools by which an agent reads runs: a server of the Model Context Protocol on standard input and output.

Each tool is a method that reads, and returns JSON of bounded size. What it cannot do is an error for the agent, in our
words, with what to do.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import retrograd as rg
from retrograd.core.errors import LaunchError, NotARunError, RetrogradError
from retrograd.core.libraries import load_library
from retrograd.core.limits import LIMITS
from retrograd.core.runs.findings import make_plain
from retrograd.core.runs.layout import is_run
from retrograd.core.runs.listed import ListedRun, choose_listed
from retrograd.core.runs.listing import find_runs, read_line
from retrograd.core.runs.loss_curve import read_curve
from retrograd.core.runs.reader import Run, open_run
from retrograd.explaining.card.describe import describe_record
from retrograd.explaining.comparing.comparison import compare
from retrograd.explaining.findings.explain import explain_record, make_record

_HOW = """Runs of training in PyTorch, as retrograd has recorded them: losses, gradients and activations of every site,
and what is wrong. Begin with list_runs, which has the name of each; then describe a run (what it did) and explain it
(what is wrong, where, since which step, at which line, and what to do). Say what a finding rests on (its evidence), and
what would refute it."""

_LISTED = "call list_runs, which has the names of all."


def serve_tools(root: Path) -> None:
    """Answer until standard input ends.

    Args:
        root: a folder of runs; nothing outside of it is read.

    Raises:
        LibraryError: the SDK of the protocol is missing, or too old.
    """
    server = load_library("mcp.server.mcpserver", "mcp", "2")
    annotations = load_library("mcp.types", "mcp", "2").ToolAnnotations(read_only_hint=True, open_world_hint=False)
    error = load_library("mcp.server.mcpserver.exceptions", "mcp", "2").ToolError
    tools = RunTools(root)
    made = server.MCPServer("retrograd", version=rg.__version__, instructions=_HOW, log_level="ERROR")
    for tool in (tools.list_runs, tools.describe, tools.explain, tools.series, tools.compare):
        made.add_tool(_telling(tool, error), annotations=annotations)
    made.run()


def _telling(tool: Callable[..., dict[str, Any]], kind: type[Exception]) -> Callable[..., dict[str, Any]]:
    """A tool whose errors of ours are those of a tool: any other is not told to whoever asks."""

    @functools.wraps(tool)
    def answer(*arguments: Any, **named: Any) -> dict[str, Any]:
        try:
            return tool(*arguments, **named)
        except RetrogradError as error:
            raise kind(str(error)) from error

    return answer


class RunTools:
    """The tools, each of which reads runs in one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def list_runs(self, search: str = "", sort: str = "when", conditions: tuple[str, ...] = ()) -> dict[str, Any]:
        """List runs: name, when, steps, status, last loss, how many findings are kept, and settings.

        Args:
            search: words that must be in a name, status, finding or setting.
            sort: a column: when (newest first), name, steps, status, loss, final, findings, or a setting such as lr.
            conditions: all must hold, as in ["status=failed", "lr>=0.01"].
        """
        inside = (run for run in find_runs(self._root) if self._holds(run))
        runs = choose_listed([ListedRun(read_line(run), read_curve(run)) for run in inside], sort, conditions, search)
        return _fit("runs", (json.loads(each.as_json()) for each in runs), len(runs))

    def describe(self, run: str) -> dict[str, Any]:
        """Say what a run did: model, loss, optimizer, inputs; and name its scalars and sites, for the tool "series"."""
        opened = self._open(run)
        card = describe_record(make_record(opened))
        lines = [{"text": str(line), "details": list(line.details)} for line in card.lines]
        scalars, sites = list(opened.history.scalars), opened.history.sites
        head = {"run": run, "status": opened.status, "missing": opened.missing, "lines": lines, "scalars": scalars}
        return head | _fit("sites", sites, len(sites))

    def explain(self, run: str) -> dict[str, Any]:
        """Find what is wrong with a run, the worst first: message, site, steps, line, evidence, repair, symptoms."""
        found = explain_record(make_record(self._open(run)))
        return {"headline": found.headline} | _fit("findings", (each.as_dict() for each in found), len(found))

    def series(self, run: str, name: str, statistic: str = "rms") -> dict[str, Any]:
        """Give numbers over steps; of many steps evenly spaced ones.

        Args:
            run: its name.
            name: one of its scalars (loss, lr, grad_norm, ...), a site (blocks.3:output.grad), or a pattern of sites.
            statistic: of a site: rms, mean, std, abs_max, l2, zero_share, nonfinite, ...
        """
        history = self._open(run).history
        curve = history.scalars.get(name)
        if curve is not None:
            return _fit("series", [_thin(name, curve.steps, curve.values)], 1)
        sites = [name] if name in history.sites else history.select(name)
        matrices = (history.matrix(statistic, [site]) for site in sites)
        each = (_thin(only.sites[0], only.steps, only.values[0]) for only in matrices)
        return {"statistic": statistic} | _fit("series", each, len(sites))

    def compare(self, a: str, b: str, noise: tuple[str, ...] = ()) -> dict[str, Any]:
        """Find where two runs first diverge by more than rounding, and why.

        Args:
            a: the name of one.
            b: the name of the other, which is B in the answer.
            noise: names of runs of the same program as a, with the same seed, by which noise is measured.
        """
        found = compare(self._open(a), self._open(b), noise=[self._open(each) for each in noise])
        head, *findings = map(json.loads, found.as_json_lines().splitlines())
        return {**head, "about": found.about} | _fit("findings", findings, len(findings))

    def _holds(self, path: Path) -> bool:
        """Return whether a path is inside of the folder, wherever links lead."""
        return path.resolve().is_relative_to(self._root)

    def _open(self, name: str) -> Run:
        """Open a run in the folder.

        Raises:
            LaunchError: it is outside.
            NotARunError, DamagedRunError: it is none, or cannot be read.
        """
        path = self._root / name
        if not self._holds(path):
            raise LaunchError(f"{name!r} is outside of the folder that may be read.", repair=_LISTED)
        if not path.is_dir() or not is_run(path):
            raise NotARunError(f"{name!r} is not a run.", repair=_LISTED)
        return open_run(path)


def _fit(name: str, entries: Iterable[Any], count: int) -> dict[str, Any]:
    """As many of these, the first ones, as an answer may hold; and how many there are."""
    kept: list[Any] = []
    size = 0
    for entry in entries:
        size += len(json.dumps(entry, ensure_ascii=False))
        if size > LIMITS.tool_letters and kept:
            break
        kept.append(entry)
    return {name: kept, "count": count, **({"left_out": count - len(kept)} if len(kept) < count else {})}


def _thin(name: str, steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> dict[str, Any]:
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), LIMITS.tool_steps)).round().astype(np.int64))
    numbers = make_plain([float(f"{value:.6g}") for value in values[chosen]])
    return {"name": name, "steps": steps[chosen].tolist(), "values": numbers, "recorded": len(steps)}
