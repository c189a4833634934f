"""Processes that tests start: some that know of each other, and forked children. None of them can hang for ever."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

Work = Callable[[int, Path], Any]
"""What one process does, given its rank and a folder that all share; what it returns must be picklable."""


LIMIT_SECONDS = 160.0
"""So long two processes may run: less than a test may take, so that none of them stays when it is given up."""
CHILD_SECONDS = 60.0
"""So long a forked child may."""
LOADED = (
    "pytest", "retrograd.core.recording.record", "retrograd.rewriting.rewriting", "torch._dynamo",
    "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel",
)  # fmt: skip
"""What takes several seconds, and most processes need."""


def start(function: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> mp.ProcessContext:
    """Have a function called in so many processes, with its rank before the arguments.

    They are forked from one that has loaded what they need, and has done nothing else.
    """
    set_forkserver_preload(list(LOADED))
    started = mp.start_processes(function, arguments, nprocs=ranks, join=False, start_method="forkserver")
    assert started is not None
    return started


def run_in_two(works: Mapping[str, Work], folder: Path) -> dict[str, list[Any]]:
    """What the works return, one after the other in each of two processes: by name, and then by rank.

    Raises:
        TimeoutError: one of them hangs.
    """
    return run_together(works, folder, 2)


def run_together(works: Mapping[str, Work], folder: Path, ranks: int) -> dict[str, list[Any]]:
    """The same in so many processes."""
    all_of_them = start(_run, (dict(works), str(folder), ranks), ranks)
    deadline = time.monotonic() + LIMIT_SECONDS
    while not all_of_them.join(timeout=1):
        if time.monotonic() > deadline:
            hanging = [rank for rank, process in enumerate(all_of_them.processes) if process.is_alive()]
            done = sorted(path.name for path in folder.glob("*.pt"))
            for process in all_of_them.processes:
                process.kill()
            raise TimeoutError(f"processes {hanging} hang; done are {done} of {list(works)}")
    found = {name: [folder / f"{name}-{rank}.pt" for rank in range(ranks)] for name in works}
    return {name: [torch.load(path, weights_only=False) for path in paths] for name, paths in found.items()}


def wait_for_child(child: int) -> int:
    """The exit code of a forked child.

    Raises:
        TimeoutError: it hangs; on stderr it has said where.
    """
    deadline = time.monotonic() + CHILD_SECONDS
    while (ended := os.waitpid(child, os.WNOHANG))[0] != child:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGABRT)  # pytest has faulthandler write its stack then
            os.waitpid(child, 0)
            raise TimeoutError(f"the forked child {child} hung for {CHILD_SECONDS:.0f} s")
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])


def _run(rank: int, works: Mapping[str, Work], folder: str, ranks: int) -> None:
    faulthandler.dump_traceback_later(LIMIT_SECONDS - 10)
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", ranks)
    limit = timedelta(seconds=100)  # where one has failed, the other does not wait for long
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
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
