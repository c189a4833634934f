"""What it costs to read a long run of many ranks: seconds, seconds of CPU, and memory at its peak.

    python benchmarks/reading.py make /tmp/long --ranks 16 --steps 5000 --sites 60
    python benchmarks/reading.py measure /tmp/long
    python benchmarks/reading.py train /tmp/wide --blocks 49 --steps 5000
    python benchmarks/reading.py measure /tmp/wide --only view explain report

``train`` records the first steps of a small GPT of so many blocks, and writes them again and again, with other numbers
and a loss that falls: all kinds of sites, events and facts are those of a recording. With ``make`` rows are invented,
and nothing is trained: of each layer there are five sites; its weights and updates are copies on all ranks, as under
DDP. Both go through the writer of recordings, flush by flush. Each line is measured in a process of
its own, from the import on. ``duckdb`` is the same merge by DuckDB, on the files as they lie: 11 statistics of each
site and step, without histograms, and copies told apart by their name alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")

ELEMENTS = 1 << 16
KINDS = ("output", "weight", "output.grad", "weight.grad", "weight.update")
SITE = "blocks.0.fc:output"
"""Of which a series is read, if it is there: the only one that a run of a single site has."""

BEHIND_THE_LARGEST = 18
"""Bins of a histogram."""


def name_sites(n: int) -> list[str]:
    return [f"blocks.{number // len(KINDS)}.fc:{KINDS[number % len(KINDS)]}" for number in range(n)]


def invent_rows(steps: range, sites: list[str], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of shape (steps, sites), and their histograms: normal elements of a size that wanders."""
    from retrograd.core.statistics.row import ROW

    rows = np.zeros((len(steps), len(sites)), ROW)
    bins = np.zeros((len(steps), len(sites), BEHIND_THE_LARGEST), np.int64)
    shares = 0.3 * 0.5 ** np.arange(BEHIND_THE_LARGEST)[::-1]
    for number, site in enumerate(sites):
        is_copy = site.endswith((":weight", ".update"))
        random = np.random.default_rng([number, steps.start, 0 if is_copy else rank])
        size = 2.0 ** (number % 7 - 3) * np.exp(0.3 * np.sin(np.array(steps) / 50))
        noise = random.standard_normal((6, len(steps)))
        n = ELEMENTS * (1 + number % 3)
        column = rows[:, number]
        column["row"], column["calls"], column["order"] = number, 1, number
        column["count"], column["zeros"] = n, np.abs(noise[0] * 10)
        column["sum"] = size * n**0.5 * noise[1]
        column["m2"] = size**2 * n * (1 + 0.01 * noise[2])
        column["abs_sum"] = size * n * 0.8 * (1 + 0.01 * noise[3])
        column["min"], column["max"] = -size * (4 + 0.3 * noise[4]), size * (4 + 0.3 * noise[5])
        column["reference"] = 100.0 * n if site.endswith(".update") else 0.0
        column["first_bin"], column["bins"] = 127 - BEHIND_THE_LARGEST + np.log2(size).astype(int), BEHIND_THE_LARGEST
        bins[:, number] = random.poisson(n * shares, (len(steps), BEHIND_THE_LARGEST))
    return rows, bins


def place(sites: list[str], ranks: int, rank: int) -> dict[str, Any]:
    everyone = list(range(ranks))
    is_copy = {site: site.endswith((":weight", ".update")) for site in sites}
    facts = {
        site: {"holds": "copy" if copied else "own", "ranks": everyone if copied else [rank]}
        for site, copied in is_copy.items()
    }
    return {"stages": {}, "sites": facts}


def write_rank(
    folder: Path, ranks: int, steps: range, sites: list[str], rank: int, histograms: bool, flush: int
) -> None:
    from retrograd.core.history.sink import Event, Moment, RowBatch
    from retrograd.core.runs.writer import RunWriter

    os.environ["RANK"] = str(rank)
    writer = RunWriter(folder, join=True, flush_seconds=1e6)
    writer.add_sites(sites)
    if ranks > 1:
        writer.describe(placements=place(sites, ranks, rank), processes=ranks)
    for first in range(0, len(steps), flush):
        batch = steps[first : first + flush]
        rows, bins = invent_rows(batch, sites, rank)
        if not histograms:
            rows["bins"] = 0
        for place_of, step in enumerate(batch):
            stretches = bins[place_of].tobytes() if histograms else b""
            writer.add_rows(RowBatch(Moment(step, 0, 0), rows[place_of].tobytes(), stretches))
            writer.add_event(Event(Moment(step), "update", "AdamW", value=1.0 + step, time=float(step)))
            writer.add_event(Event(Moment(step), "loss", value=1 / (1 + step), time=float(step)))
        writer.flush()
    writer.close()


def make(arguments: argparse.Namespace) -> None:
    sites = name_sites(arguments.sites)
    began = time.perf_counter()
    for rank in range(arguments.ranks):
        write_rank(
            arguments.folder,
            arguments.ranks,
            range(0, arguments.steps, arguments.every),
            sites,
            rank,
            not arguments.without_histograms,
            arguments.flush,
        )
    rows = arguments.ranks * len(range(0, arguments.steps, arguments.every)) * arguments.sites
    tell_size(arguments.folder, rows, time.perf_counter() - began)


def tell_size(folder: Path, rows: int, seconds: float) -> None:
    files = list(folder.rglob("*.parquet"))
    size = sum(path.stat().st_size for path in files)
    print(
        f"{rows:,} rows in {len(files):,} part files, {size / 1e6:,.0f} MB, {size / rows:.0f} B and "
        f"{seconds / rows * 1e6:.1f} µs a row"
    )


# ---- a recording that goes on ----


class KeptSink:
    """A sink that keeps what it is given, to be written again; its methods are those of a sink."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.sites: list[str] = []
        self.batches: dict[int, list[Any]] = {}
        self.events: dict[int, list[Any]] = {}

    def describe(self, **facts: Any) -> None:
        self.facts.update(facts)

    def add_sites(self, names: Sequence[str]) -> None:
        self.sites += names

    def add_rows(self, batch: Any) -> None:
        self.batches.setdefault(batch.moment.step, []).append(batch)

    def add_event(self, event: Any) -> None:
        self.events.setdefault(event.moment.step, []).append(event)

    def add_tensor(self, kept: Any) -> None: ...

    def flush(self) -> None: ...

    def close(self, status: str = "finished") -> None: ...


def record_gpt(blocks: int, steps: int) -> KeptSink:
    """Record some steps of a GPT in small, as ``retrograd run`` would."""
    import torch
    from torch import nn

    from retrograd.core.recording.recorder import Recorder
    from retrograd.core.recording.settings import Settings

    width = 16

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.ln_1(x)
            x = x + self.attn(y, y, y, need_weights=False)[0]
            return x + self.mlp(self.ln_2(x))

    torch.manual_seed(0)
    torch.set_num_threads(1)
    body = nn.Sequential(*(Block() for _ in range(blocks)))
    model = nn.Sequential(nn.Embedding(100, width), body, nn.LayerNorm(width), nn.Linear(width, 100))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    sink = KeptSink()
    recorder = Recorder(model, sink, Settings(), loose=True)
    recorder.attach()
    for _ in range(steps):
        tokens = torch.randint(0, 100, (4, 16))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    recorder.close("finished")
    return sink


def vary(batch: Any, step: int) -> Any:
    """Rows of another step: each tensor as it was, some percent larger or smaller."""
    from retrograd.core.statistics.row import ROW

    random = np.random.default_rng(step)
    rows = np.frombuffer(batch.rows, ROW).copy()
    factor = np.exp(0.1 * random.standard_normal(len(rows)))
    for name in ("sum", "abs_sum", "min", "max"):
        rows[name] *= factor
    rows["m2"] *= factor**2
    bins = np.frombuffer(batch.bins, np.int64)
    moved = bins + (bins * random.normal(0.0, 0.1, len(bins))).astype(np.int64)
    return replace(batch, moment=replace(batch.moment, step=step), rows=rows.tobytes(), bins=moved.tobytes())


def train(arguments: argparse.Namespace) -> None:
    from retrograd.core.runs.writer import RunWriter

    began, recorded = time.perf_counter(), 33
    kept = record_gpt(arguments.blocks, recorded)
    writer = RunWriter(arguments.folder, flush_seconds=1e6, queue_bytes=1 << 30)
    writer.add_sites(kept.sites)
    writer.describe(**kept.facts)
    each_step = [event for event in kept.events[recorded - 1] if event.kind in ("loss", "update")]
    for step in range(arguments.steps):
        source = step if step < recorded else recorded // 2 + step % (recorded // 2)
        for batch in kept.batches[source]:
            writer.add_rows(batch if step < recorded else vary(batch, step))
        for event in kept.events[step] if step < recorded else each_step:
            value = 4.6 * (0.2 + np.exp(-step / arguments.steps)) if event.kind == "loss" else event.value
            moment = replace(event.moment, step=step)
            writer.add_event(replace(event, moment=moment, value=value, time=float(step)))
        if step % arguments.flush == arguments.flush - 1:
            writer.flush()
    writer.close()
    tell_size(arguments.folder, arguments.steps * len(kept.sites), time.perf_counter() - began)


# ---- what is measured, each in a process of its own ----


def _open(folder: Path) -> Any:
    import retrograd as rg

    return rg.open_run(folder)


def _series(folder: Path) -> Any:
    history = _open(folder).history
    sites = history.sites
    return history[SITE if SITE in sites else sites[len(sites) // 2]].rms


def _matrix(folder: Path) -> Any:
    return _open(folder).history.matrix("rms").values


def _explain(folder: Path) -> Any:
    import retrograd as rg

    return rg.explain(folder)


def _view(folder: Path) -> Any:
    import retrograd as rg

    return rg.format_table(rg.open_run(folder), most=40)


def _every(folder: Path) -> Any:
    """The table of all sites."""
    import retrograd as rg

    return rg.format_table(folder)


def _compare(folder: Path) -> Any:
    """With itself: no difference ends it early."""
    import retrograd as rg

    return rg.compare(folder, folder)


def _export(folder: Path) -> Any:
    import retrograd as rg

    return rg.export(folder, "parquet", folder.parent / f"{folder.name}.parquet")


def _ls(folder: Path) -> Any:
    from retrograd.core.runs.listing import find_runs, read_line

    return list(map(read_line, find_runs(folder.parent)))


def _report(folder: Path) -> Any:
    import retrograd as rg

    return rg.write_report(folder, folder.parent / f"{folder.name}.html")


def _together(folder: Path) -> Any:
    """What the bar is about: open, one series, the report."""
    import retrograd as rg

    run = _open(folder)
    run.history[SITE].rms  # noqa: B018
    return rg.write_report(run, folder.parent / f"{folder.name}.html")


def _duckdb(folder: Path) -> Any:
    import duckdb

    statement = f"""
    SELECT site, step, sum(calls), sum("count"), sum(nan), sum(pos_inf), sum(neg_inf), sum(zeros), sum("sum"),
        sum(m2 + "sum" * "sum" / "count"), sum(abs_sum), min("min"), max("max")
    FROM read_parquet('{folder}/rank*/statistics/*.parquet', filename = true)
    WHERE phase = 'train' AND backward <= 0
        AND (site NOT SIMILAR TO '.*(:weight|update)' OR filename LIKE '%rank00000%')
    GROUP BY site, step
    """
    return duckdb.execute(statement).fetchnumpy()


WORK: dict[str, Callable[[Path], Any]] = {
    "open": _open,
    "series": _series,
    "matrix": _matrix,
    "view": _view,
    "every": _every,
    "explain": _explain,
    "compare": _compare,
    "export": _export,
    "ls": _ls,
    "report": _report,
    "together": _together,
    "duckdb": _duckdb,
}


def carry_out(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    WORK[arguments.work](arguments.folder)
    wall = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3]))


def measure(arguments: argparse.Namespace) -> None:
    print(f"| {arguments.folder.name} | wall s | CPU s | MB |\n| --- | --- | --- | --- |")
    for work in arguments.only or WORK:
        words = [sys.executable, __file__, "do", str(arguments.folder), work]
        told = []
        for _ in range(arguments.rounds):
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=arguments.timeout)
            if done.returncode:
                print(f"| {work} | {done.stderr.strip().splitlines()[-1]} |")
                break
            told.append(json.loads(done.stdout.splitlines()[-1]))
        else:
            wall, cpu, memory = np.median(told, axis=0)
            print(f"| {work} | {wall:.2f} | {cpu:.2f} | {memory:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("make")
    making.add_argument("--ranks", type=int, default=16)
    making.add_argument("--steps", type=int, default=5000)
    making.add_argument("--sites", type=int, default=60)
    making.add_argument("--every", type=int, default=1, help="of so many steps one is recorded")
    making.add_argument("--without-histograms", action="store_true")
    making.add_argument("--flush", type=int, default=100, help="steps that are written together: two seconds of them")
    making.set_defaults(carry_out=make)
    training = commands.add_parser("train")
    training.add_argument("--blocks", type=int, default=49, help="40 sites each: 49 are 1,978")
    training.add_argument("--steps", type=int, default=5000)
    training.add_argument("--flush", type=int, default=38, help="steps in a part file")
    training.set_defaults(carry_out=train)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--only", nargs="*", choices=WORK)
    measuring.add_argument("--rounds", type=int, default=3)
    measuring.add_argument("--timeout", type=float, default=100.0)
    measuring.set_defaults(carry_out=measure)
    doing = commands.add_parser("do")
    doing.set_defaults(carry_out=carry_out)
    for each in (making, training, measuring, doing):
        each.add_argument("folder", type=Path)
    doing.add_argument("work", choices=WORK)
    arguments = parser.parse_args()
    arguments.carry_out(arguments)


if __name__ == "__main__":
    main()
