"""Processes that tests start: some that know of each other, and forked children. None of them can hang for ever."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests import warm

Work = Callable[[int, Path], Any]
"""What one process does, given its rank and a folder that all share; what it returns must be picklable."""


ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 160.0
"""So long two processes may run: less than a test may take, so that none of them stays when it is given up."""
CHILD_SECONDS = 60.0
"""So long a forked child may."""


def run_in_two(works: Mapping[str, Work], folder: Path) -> dict[str, list[Any]]:
    """What the works return, one after the other in each of two processes: by name, and then by rank.

    Raises:
        TimeoutError: one of them hangs.
    """
    return run_together(works, folder, 2)


def run_together(works: Mapping[str, Work], folder: Path, ranks: int) -> dict[str, list[Any]]:
    """The same in so many processes."""
    logs = [folder / f"errors-{rank}.txt" for rank in range(ranks)]
    processes = [start(_run, rank, dict(works), str(folder), ranks, log=log) for rank, log in enumerate(logs)]
    try:
        _wait(processes, logs, folder)
    finally:
        for process in processes:
            process.kill()
            process.wait()
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


def start(work: Callable[..., object], *arguments: object, log: Path) -> warm.Popen:
    """Call a function in a process of its own, which has loaded torch already; its stderr goes to this file."""
    call = log.with_suffix(".call")
    call.write_bytes(pickle.dumps((work, arguments)))
    code = "import pickle, sys; work, arguments = pickle.load(open(sys.argv[1], 'rb')); work(*arguments)"
    with log.open("wb") as file:
        return warm.Popen([sys.executable, "-c", code, str(call)], cwd=ROOT, stderr=file, stage="tests")


def _wait(processes: list[warm.Popen], logs: list[Path], folder: Path) -> None:
    """Wait until all have ended, or one has failed."""
    deadline = time.monotonic() + LIMIT_SECONDS
    running = list(range(len(processes)))
    while running:
        time.sleep(0.02)
        for rank in running:
            assert not processes[rank].poll(), f"process {rank} has failed: {logs[rank].read_text()}"
        running = [rank for rank in running if processes[rank].poll() is None]
        if running and time.monotonic() > deadline:
            done = sorted(path.name for path in folder.glob("*.pt"))
            raise TimeoutError(f"processes {running} hang; done are {done}")


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
