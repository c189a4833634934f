"""What merging ranks costs: what one rank merges, what a step costs with it and without, and what 1,000 ranks would.

python benchmarks/merging.py rows [--ranks 16] [--sites 1000]
python benchmarks/merging.py tree [--ranks 1000] [--sites 60] [--steps 20]
torchrun --nproc-per-node 4 benchmarks/merging.py step [--sites 100]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from rank_tree import Sizes, Tree, size_of, write_alone
from retrograd.core.history.sink import Moment, RowBatch, Unit
from retrograd.core.merging.holdings import Holdings, Parcel
from retrograd.core.merging.messages import Frames, pack_parcels, unpack_parcels
from retrograd.core.merging.rows import rank_rows
from retrograd.core.merging.sites import SharedSites
from retrograd.core.merging.tree import find_children
from retrograd.core.statistics.row import ROW

BINS = 20
LONG_STEPS, MANY_SITES = 1_000_000, 1_000
"""The run of which it is computed what it would write."""


class Table:
    """Prints each row when it is there.

    Args:
        columns: what stands above.
        only: rows are printed whose first cell contains one of these.
        is_markdown: print it so.
    """

    def __init__(self, columns: Sequence[str], only: Collection[str], *, is_markdown: bool) -> None:
        self._only = only
        self._is_markdown = is_markdown
        self._widths = [max(len(column), 12) for column in columns]
        self._widths[0] = 30
        self._print(columns)
        if is_markdown:
            self._print(["---"] + ["---:"] * (len(columns) - 1))

    def wants(self, name: str) -> bool:
        """Whether a row of this name is printed."""
        return any(text in name for text in self._only)

    def add(self, *cells: str) -> None:
        """Print a row."""
        if self.wants(cells[0]):
            self._print(cells)

    def _print(self, cells: Sequence[str]) -> None:
        if self._is_markdown:
            print(f"| {' | '.join(cells)} |", flush=True)
            return
        first, *others = (f"{cell:>{width}}" for cell, width in zip(cells, self._widths, strict=True))
        print("  ".join([f"{first.strip():<{self._widths[0]}}", *others]), flush=True)


def show_bytes(n: float) -> str:
    power = next(power for power in (4, 3, 2, 1, 0) if n >= 1000**power or not power)
    size = n / 1000**power
    return f"{size:,.{1 if size < 10 and power else 0}f} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


def show_milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{2 if seconds < 1e-3 else 1}f} ms"


# ---- what one rank merges ----


def make_batch(step: int, sites: int, rank: int) -> RowBatch:
    """Rows with a histogram of twenty bins each."""
    draw = np.random.default_rng((step, rank))
    rows = np.zeros(sites, ROW)
    rows["row"], rows["calls"], rows["count"] = np.arange(sites), 1, 4096
    for name in ("sum", "m2", "abs_sum", "min", "max"):
        rows[name] = draw.random(sites)
    rows["first_bin"], rows["bins"] = 100 + rank % 4, BINS
    return RowBatch(Moment(step), rows.tobytes(), draw.integers(1, 99, sites * BINS).tobytes())


def measure_rows(given: argparse.Namespace) -> None:
    """Time what a rank with so many below it does: unpack, merge, pack."""
    table = Table(("copies", "CPU a step", "rows/s", "a rank and step"), given.only, is_markdown=given.markdown)
    for name in ("all differ", "copies are alike"):
        if table.wants(name):
            seconds, size = _time_merging(given.ranks, given.sites, given.steps or 6, is_alike=name != "all differ")
            rate = given.ranks * given.sites / seconds
            table.add(name, show_milliseconds(seconds), f"{rate:,.0f}", show_bytes(size))


def _time_merging(ranks: int, sites: int, steps: int, *, is_alike: bool) -> tuple[float, float]:
    """CPU seconds of a step, and bytes that each rank sends for it."""
    shared = SharedSites(ranks)
    for number in range(sites):  # one half are copies on all ranks
        shared.place(f"{number}:x", "copy", "", [range(ranks)] if number % 2 else [])
    codes = np.arange(sites)

    def pack_step(step: int, rank: int) -> list[bytes]:
        rows = rank_rows(make_batch(step, sites, 0 if is_alike else rank), codes, shared, rank)
        return list(pack_parcels([Parcel((step, 0), (Unit(rank, step, step, 0),), (rows,))]))

    holdings = Holdings(shared, range(ranks))
    holdings.merger.is_top = True
    taken, size = [], 0
    for step in range(steps):
        frames = [frame for rank in range(ranks) for frame in pack_step(step, rank)]
        size = sum(map(len, frames))
        began = time.process_time()
        for rank, frame in enumerate(frames):
            for head, body in Frames().add(frame):
                for parcel in unpack_parcels(head, body, codes, ranks):
                    holdings.accept(parcel, range(rank, rank + 1))
        b"".join(pack_parcels(holdings.take()))
        taken.append(time.process_time() - began)
    return statistics.median(taken), size / ranks


# ---- what a step costs ----


def measure_steps(given: argparse.Namespace, width: int = 256) -> None:
    """Time steps without recording, with it, and with merging, taking turns."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import retrograd as rg

    steps = given.steps or 60
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(max(given.sites // 8, 1))))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    names = [name for name in ("bare", "ranks apart", "merged") if any(text in name for text in given.only)]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    files: dict[str, str] = dict.fromkeys(names, "")
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        for turn in range(3):
            for name, times in found.items():
                path = Path(folders[0]) / f"{name}-{turn}"
                recording = None if name == "bare" else rg.record(model, path, merge_ranks=name == "merged")
                dist.barrier()
                began, cpu = time.perf_counter(), time.process_time()
                for _ in range(steps):
                    optimizer.zero_grad()
                    model(torch.randn(32, width)).square().mean().backward()
                    optimizer.step()
                times.append(((time.perf_counter() - began) / steps, (time.process_time() - cpu) / steps))
                if recording is not None:
                    recording.close()
                dist.barrier()
                written = [each.stat().st_size for each in path.rglob("*") if each.is_file()]
                files[name] = f"{len(written)}, {show_bytes(sum(written))}"
                dist.barrier()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        columns = ("", "a step", "CPU a rank", "CPU of rank 0", "files")
        table = Table(columns, given.only, is_markdown=given.markdown)
        for name in names:
            wall, cpu = (statistics.median(times[at] for each in every for times in each[name]) for at in (0, 1))
            root = statistics.median(times[1] for times in found[name])
            table.add(name, *map(show_milliseconds, (wall, cpu, root)), files[name])
    dist.destroy_process_group()


# ---- what 1,000 ranks would cost ----


def measure_tree(given: argparse.Namespace) -> None:
    """Put a tree of ranks through all that merges and writes, in one process."""
    steps, many = given.steps or 20, not given.without_histograms
    blocks = [range(first, min(first + given.flush, steps)) for first in range(0, steps, given.flush)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder) / "merged", given.ranks, given.sites, has_histograms=many)
        before = tree.count_bytes()
        for block in blocks:
            tree.train(block)
        sent, told = (
            [(now - then) / steps for now, then in zip(*each, strict=True)]
            for each in zip(tree.count_bytes(), before, strict=True)
        )
        columns = ("rank", "how many", "below", "CPU a step", "comes in", "goes out", "is told")
        table = Table(columns, given.only, is_markdown=given.markdown)
        for name, group in tree.group_ranks().items():
            children = [find_children(rank, given.ranks) for rank in group]
            cells = (
                show_milliseconds(statistics.median(statistics.mean(tree.cpu[rank][2:steps]) for rank in group)),
                spread([sum(sent[each] for each in below) for below in children], show_bytes),
                spread([sent[rank] for rank in group], show_bytes),
                spread([told[rank] for rank in group], show_bytes),
            )
            table.add(name, str(len(group)), spread(list(map(len, children)), "{:.0f}".format), *cells)
        tree.end()
        write_alone(Path(folder) / "apart", given.sites, blocks, has_histograms=many)
        sizes = {name: size_of(Path(folder) / name) for name in ("merged", "apart")}
    others = tree.writing[1 : len(blocks)] or tree.writing[:1]  # the first loads what writes
    writing = statistics.median(others) / len(blocks[0])
    print(f"\nrank 0 writes in {show_milliseconds(writing)} of CPU a step, of which {len(blocks[0])} go into a file")
    print(f"{tree.n_checked} merged rows are what all ranks' rows are when numpy adds them up\n")
    print_arithmetic(given, sizes, steps)


def print_arithmetic(given: argparse.Namespace, sizes: dict[str, Sizes], steps: int) -> None:
    """Print what was written, and what a long run would write: that times its rows."""
    long = f"{LONG_STEPS:,} steps x {MANY_SITES:,} sites"
    columns = ("written", "rows", "a row", "rows, bytes", "ends of files", "other files", long)
    table = Table(columns, given.only, is_markdown=given.markdown)
    n = steps * given.sites
    for name, key, ranks in (
        ("one rank by itself", "apart", 1),
        ("all ranks apart", "apart", given.ranks),
        ("all ranks merged", "merged", 1),
    ):
        found = sizes[key]
        long_bytes = ranks * found.rows / n * LONG_STEPS * MANY_SITES
        cells = (found.rows / n, *(ranks * each for each in found), long_bytes)
        table.add(name, f"{ranks * n:,}", *map(show_bytes, cells))


def spread(numbers: Sequence[float], show: Any) -> str:
    """The mean, or the least and the most where these are far apart."""
    least, most = min(numbers), max(numbers)
    if most <= 1.5 * least or show(least) == show(most):
        return str(show(sum(numbers) / len(numbers)))
    return f"{show(least)} to {show(most)}"


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="rows | step | tree")
    for name, measure, ranks, sites in (
        ("rows", measure_rows, 16, 1000),
        ("step", measure_steps, 0, 100),
        ("tree", measure_tree, 1000, 60),
    ):
        command = commands.add_parser(name, help=(measure.__doc__ or "").strip())
        if ranks:
            command.add_argument("--ranks", type=int, default=ranks)
        command.add_argument("--sites", type=int, default=sites)
        command.add_argument("--steps", type=int, default=0)
        command.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="rows whose name contains a text")
        command.add_argument("--markdown", action="store_true")
        command.set_defaults(measure=measure)
    command.add_argument("--flush", type=int, default=5, help="so many steps are written at once")
    command.add_argument("--without-histograms", action="store_true")
    given = parser.parse_args()
    given.measure(given)


if __name__ == "__main__":
    main()
