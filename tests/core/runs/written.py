"""Writing run folders, and comparing what is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from retrograd.core.history.history import History
from retrograd.core.history.sink import Event, KeptTensor, Moment, RowBatch
from retrograd.core.runs.writer import RunWriter
from tests.core.history.made import SITES, make_steps

opened: list[RunWriter] = []
"""All writers that tests have opened and not closed by way of a fixture."""

NEVER = 1e6
"""Seconds between flushes for a writer that flushes when told to."""


def open_writer(path: Path | str, **options: Any) -> RunWriter:
    """A writer that flushes when told to, and knows the sites."""
    writer = RunWriter(path, **{"flush_seconds": NEVER, **options})
    opened.append(writer)
    writer.add_sites(SITES)
    return writer


def write_run(path: Path, steps: Sequence[int] = range(3), **options: Any) -> Path:
    """A run of some steps, a flush each."""
    writer = open_writer(path, **options)
    for batch in make_steps(steps):
        add_step(writer, batch)
        writer.flush()
    writer.close()
    return path


def add_step(writer: RunWriter, batch: RowBatch) -> None:
    """A step's rows, its loss, and a tensor."""
    step = batch.moment.step
    writer.add_rows(batch)
    writer.add_event(Event(Moment(step, 0, 0), "loss", value=float(step), time=float(step)))
    writer.add_tensor(keep(step, torch.full((2,), float(step))))


def keep(step: int, tensor: torch.Tensor, site: str = "a:output", **rest: Any) -> KeptTensor:
    """A tensor as a recorder hands it over."""
    return KeptTensor(Moment(step), site, tensor, tensor._version, **rest)


def sort_rows(history: History) -> pa.Table:
    """All rows with plain texts, in an order that does not depend on how they were stored."""
    table = history.table()
    for name in ("site", "phase"):
        table = table.set_column(table.column_names.index(name), name, table[name].cast(pa.string()))
    keys = ["rank", "step", "micro", "backward", "phase", "site", "count", "sum", "min", "max", "m2", "scale"]
    order = pc.sort_indices(table, [(key, "ascending") for key in keys])
    return table.take(order).combine_chunks()


def files(run: Path, kind: str, rank: str = "rank00000") -> list[str]:
    """Names of the files of a kind, save those that are being written."""
    return sorted(path.name for path in (run / rank / kind).glob("[!.]*"))
