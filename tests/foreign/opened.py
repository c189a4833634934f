"""Opens folders that somebody else has written, and looks at all of what is in them.

    python -m tests.foreign.opened FOLDER

prints a line of JSON for each folder in that folder: its name, and what came of it. What a folder holds is told by the
beginning of its name, as in ``run-17``.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import retrograd as rg
from retrograd.cli import main as run_command
from retrograd.hangs.ring_file import read_rings
from retrograd.views.table import print_table
from tests.apart import call_apart


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


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a forked process has no others
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        look = LOOKS[folder.name.partition("-")[0]]
        print(json.dumps([folder.name, *call_apart(lambda look=look, folder=folder: look(folder))]), flush=True)


if __name__ == "__main__":
    main()
