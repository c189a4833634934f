"""What merging ranks costs: rows a second that one rank merges, and what a step costs with it and without.

python benchmarks/merging.py rows [--ranks 16] [--sites 1000]
torchrun --nproc-per-node 4 benchmarks/merging.py step [--sites 100]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import retrograd as rg
from retrograd.history.sink import Moment, RowBatch
from retrograd.merging.messages import Frames, pack_rows, unpack_rows
from retrograd.merging.rows import RankedRows, RowMerger, rank_rows
from retrograd.merging.sites import SharedSites
from retrograd.statistics.row import ROW

BINS = 20


def make_batch(step: int, sites: int, rank: int) -> RowBatch:
    """Rows with a histogram of twenty bins each."""
    draw = np.random.default_rng((step, rank))
    rows = np.zeros(sites, ROW)
    rows["row"], rows["calls"], rows["count"] = np.arange(sites), 1, 4096
    for name in ("sum", "m2", "abs_sum", "min", "max"):
        rows[name] = draw.random(sites)
    rows["first_bin"], rows["bins"] = 100 + rank % 4, BINS
    return RowBatch(Moment(step), rows.tobytes(), draw.integers(1, 99, sites * BINS).tobytes())


def measure_rows(ranks: int, sites: int, steps: int = 6) -> None:
    """Time what a rank with so many below it does: unpack, merge, pack."""
    shared = SharedSites(ranks)
    for number in range(sites):  # one half are copies on all ranks
        shared.place(f"{number}:x", "copy", "", [range(ranks)] if number % 2 else [])
    codes = np.arange(sites)
    messages = [
        [
            frame
            for rank in range(ranks)
            for frame, _ in pack_rows(
                [rank_rows(make_batch(step, sites, rank if step % 2 else 0), codes, shared, rank)]
            )
        ]
        for step in range(steps)
    ]
    merger = RowMerger(shared, range(ranks))
    merger.is_top = True
    taken = []
    for frames in messages:
        began = time.process_time()
        for frame in frames:
            for head, body in Frames().add(frame):
                for rows in unpack_rows(head, body, codes, ranks):
                    merger.add(rows)
        merged: list[RankedRows] = list(merger.take())
        b"".join(packed for packed, _ in pack_rows(merged))
        taken.append(time.process_time() - began)
    seconds = statistics.median(taken)
    size = sum(map(len, messages[0])) / ranks
    print(
        f"{ranks} ranks x {sites} sites: {seconds * 1e3:.1f} ms of CPU a step, {ranks * sites / seconds:,.0f} rows/s; "
        f"{size / 1e3:.0f} kB a rank and step"
    )


def measure_steps(sites: int, steps: int = 60, width: int = 256) -> None:
    """Time steps without recording, with it, and with merging, taking turns."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(sites // 8)))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found: dict[str, list[tuple[float, float]]] = {"bare": [], "ranks apart": [], "merged": []}
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        for turn in range(3):
            for name, times in found.items():
                path = Path(names[0]) / f"{name}-{turn}"
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
                if recording is not None and turn == 0 and dist.get_rank() == 0:
                    files = [each for each in path.rglob("*") if each.is_file()]
                    print(f"{name}: {len(files)} files, {sum(each.stat().st_size for each in files) / 1e3:.0f} kB")
                dist.barrier()
        every: list[dict[str, list[tuple[float, float]]] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        for name in found:
            wall, cpu = (
                statistics.median(times[at] for each in every if each for times in each[name]) for at in (0, 1)
            )
            print(f"{name}: {wall * 1e3:.2f} ms, {cpu * 1e3:.2f} ms of CPU a step and rank")
        root = statistics.median(times[1] for times in found["merged"])
        print(f"of rank 0, merged: {root * 1e3:.2f} ms of CPU a step")
    dist.destroy_process_group()


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["rows", "step"])
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--sites", type=int, default=1000)
    given = parser.parse_args()
    if given.what == "rows":
        measure_rows(given.ranks, given.sites)
    else:
        measure_steps(given.sites)


if __name__ == "__main__":
    main()
