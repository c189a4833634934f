"""A run in a tracker while it trains, told by a process of its own beside the program that is recorded.

The program does not load the tracker's library, hears of none of its errors, and may be killed: what was recorded is
told all the same.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from retrograd.core.errors import LaunchError, NothingRecordedError, RetrogradError
from retrograd.core.exports.mirror import Mirror, mirror
from retrograd.core.files import refuse_link
from retrograd.core.foreign.text import show_plainly
from retrograd.core.launch.beside import answer, is_alive, start_beside
from retrograd.core.notices import say
from retrograd.core.ranks.processes import ask_rank
from retrograd.core.runs.layout import LOCK, is_run, list_rank_folders, rank_name
from retrograd.core.runs.lock import Lock, is_locked

_LOOK = 0.2  # seconds between two looks whether the run has begun, or is over

_THEIRS = ("RUN_ID", "RESUME", "SWEEP_ID", "SWEEP_PARAM_PATH")
"""What W&B's variables say of the program's own run, and not of ours."""


def mirror_beside(run: Path, to: str, *, first: int = 0, quiet: bool = False) -> int:
    """Mirror a run as long as it is recorded by this process, whatever program it becomes, or by one below it.

    Args:
        run: its folder, which comes later.
        to: which tracker.
        first: the lowest rank that records.
        quiet: say only what goes wrong.

    Returns:
        The number of the process that does it.

    Raises:
        LaunchError: it cannot be started, or the library of the tracker is missing.
    """
    said = json.loads(
        start_beside(__name__, str(run), str(os.getpid()), to, str(first), str(int(quiet)), is_heard=True)
    )
    if "problem" in said:
        raise LaunchError(said["problem"], repair=said["repair"])
    return int(said["process"])


def main() -> None:
    """Mirror the run of a process; the arguments are those of :func:`mirror_beside`."""
    run, process, to = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    first, quiet = int(sys.argv[4]), bool(int(sys.argv[5]))
    for name in _THEIRS:
        os.environ.pop(f"WANDB_{name}", None)
    os.environ["WANDB_SILENT"] = "true"  # what libraries have to say of their own work is no word to the program's user
    logging.disable(logging.INFO)
    try:
        import_module(f"retrograd.core.exports.{to}")
    except RetrogradError as error:
        answer(json.dumps({"problem": error.problem, "repair": error.repair}))
        return
    answer(json.dumps({"process": os.getpid()}))
    warnings.showwarning = _say_warning
    try:
        mirrored = await_run(run, process, to, first)
    except Exception as error:
        say(f"the run is not mirrored to {to}: {show_plainly(str(error))}")
        return
    if mirrored is None:
        return
    if not quiet:
        say(f"live in {to}, while it runs: {mirrored.place}")
    while not mirrored.wait(_LOOK) and is_recorded(run):
        pass
    mirrored.close()
    if not quiet:
        say(f"{to} was sent {mirrored.told}")
    if not mirrored.is_over:  # it was said that the last is missing, and the library may wait for its server for ever
        os._exit(1)


def await_run(run: Path, process: int, to: str, first: int) -> Mirror | None:
    """Begin to mirror a run when it begins; None where that is not for us.

    It is so where the program never trains, where the first rank that records is on another machine, and where ranks
    were started one by one, and another one's process does it.
    """
    lock: Lock | None = None
    while "RANK" not in os.environ or ask_rank() == first:
        goes_on = is_alive(process)
        if (run / rank_name(first)).is_dir() and is_run(run):
            if lock is None:
                folder = refuse_link(run / to)
                folder.mkdir(exist_ok=True)
                lock = Lock(folder / LOCK)  # until this process ends
                if not lock.acquire():
                    return None
            with contextlib.suppress(NothingRecordedError):
                return mirror(run, to)
        if not goes_on:
            return None
        time.sleep(_LOOK)
    return None


def is_recorded(run: Path) -> bool:
    """Return whether any process records a run."""
    return any(is_locked(folder / LOCK) for folder in list_rank_folders(run))


def _say_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    say(show_plainly(str(message)))
