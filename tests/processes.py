"""Two processes on this machine that know of each other, for tests of what is trained in several."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

Work = Callable[[int, Path], Any]
"""What one process does, given its rank and a folder that all share; what it returns must be picklable."""


def run_in_two(works: Mapping[str, Work], folder: Path) -> dict[str, list[Any]]:
    """What the works return, one after the other in each of two processes: by name, and then by rank."""
    mp.spawn(_run, (dict(works), str(folder)), nprocs=2)
    return {name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(2)] for name in works}


def _run(rank: int, works: Mapping[str, Work], folder: str) -> None:
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    limit = timedelta(seconds=120)  # where one has failed, the other does not wait for long
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    try:
        for name, work in works.items():
            try:
                found = work(rank, Path(folder))
            except BaseException as error:
                error.add_note(f"in {name!r}, process {rank}")
                raise
            torch.save(found, f"{folder}/{name}-{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()
