"""Opens a folder that somebody else has written, and looks at all of what is in it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import retrograd as rg
from retrograd.core.cli import main as run_command
from retrograd.core.views.table import print_table
from retrograd.following.hangs.ring_file import read_rings


def look_at_run(folder: Path) -> None:
    run = rg.open_run(folder)
    for site in run.history.sites:
        series = run.history[site]
        assert len(series.steps) == len(series.statistic("rms"))
        for kept in series.tensors:
            kept.load()
    rg.write_report(run, folder / "page.html")
    with contextlib.redirect_stdout(io.StringIO()):
        print_table(run)


def look_at_features(folder: Path) -> None:
    features = rg.open_features(folder)
    for feature in features.values():
        assert len(feature[:]) == features.samples
        assert len(list(feature)) == features.samples


def look_at_graph(folder: Path) -> None:
    graph = rg.Graph.load(folder / "graph.parquet")
    rg.draw_graph(graph, folder / "page.html")
    rg.print_graph(graph, file=io.StringIO())


def look_at_trace(folder: Path) -> None:
    trace = rg.Trace.load(folder / "trace.json.gz")
    rg.print_trace(trace, file=io.StringIO())
    rg.write_chrome_trace(trace, folder / "chrome.json")


def look_at_inventory(folder: Path) -> None:
    inventory = rg.Inventory.load(folder / "inventory.parquet")
    rg.write_inventory(inventory, folder / "page.html")
    rg.print_inventory(inventory, file=io.StringIO())


def look_at_rings(folder: Path) -> None:
    read_rings(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        run_command(["hangs", "--once", str(folder)])


LOOKS: dict[str, Callable[[Path], None]] = {
    "run": look_at_run,
    "features": look_at_features,
    "graph": look_at_graph,
    "trace": look_at_trace,
    "inventory": look_at_inventory,
    "rings": look_at_rings,
}
"""By the beginning of the name of a folder, as in ``run-17``."""
