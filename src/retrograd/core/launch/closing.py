"""The last line on stderr: what has become of what was asked for. Loads without torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrograd.core.addresses import open_folder
from retrograd.core.amounts import count_of
from retrograd.core.launch.beside import is_alive
from retrograd.core.launch.requests import MIRROR, RunRequest, list_requests
from retrograd.core.launch.start import Request, make_own_environment
from retrograd.core.limits import LIMITS
from retrograd.core.notices import say, showing
from retrograd.core.runs.layout import FINDINGS

SPEAKER = "RETROGRAD_SPEAKER"
"""Environment variable with the number of the one process that speaks, the first Python process that was started."""


_LOOK = 0.05  # seconds between two looks whether it is


def say_end(obstacle: str, done: str = "", *, saw_nothing: bool = False) -> None:
    """Report how it ended, if this is the process that reports for all.

    Args:
        obstacle: why this process has done nothing.
        done: what it has done; empty for nothing. Its children may have done something all the same.
        saw_nothing: that is why; a child that was killed may have seen something all the same.
    """
    if not is_reporting_process():
        return
    request = _read_request()
    if request is None or not request.done:
        say(obstacle)
        return
    folder = open_folder(request.path)
    others = len(list(folder.glob(request.leaves))) - bool(done)
    if others > 0:
        done = (
            f"{done}, and {count_of(others, 'more process', 'more processes')}"
            if done
            else f"in {count_of(others, 'process', 'processes')}"
        )
    if not done and saw_nothing and any(folder.glob("rank*")):
        obstacle = f"a backward pass began and did not end; see where with: retrograd hangs {request.shown}"
    if not done:
        _remove_empty(Path(request.path))
        say(f"{request.undone}{obstacle}")
    elif not isinstance(request, RunRequest):
        say(f"{request.done} {done}; {request.see.format(request.shown)}")
    elif not request.quiet:
        with showing(f"looking for what is wrong in {request.shown}"):
            found = _ask_verdict(folder, request.shown)
        if not _is_explained(folder):
            _say_failure(folder, request.command)
        say(f"{request.done} {done}" + (found or f"; {request.see.format(request.shown)}"))
    if done:
        _await_mirror()


def _remove_empty(folder: Path) -> None:
    """Remove a folder that was made for its date alone, and ``runs`` around it; any other may be the user's."""
    with contextlib.suppress(OSError):
        if re.search(r"\d{8}-\d{6}", folder.name):
            folder.rmdir()
            if folder.parent.name == "runs":
                folder.parent.rmdir()


def _read_request() -> Request | None:
    """The request that this process was started with; None where the program has taken it out of its environment."""
    return next((kind.read(os.environ) for kind in list_requests() if kind.variable in os.environ), None)


def _ask_verdict(run: Path, shown: str) -> str:
    """Return the verdict on a run; empty where it cannot be had.

    A process of its own tells it: in this one, which ends, the program may have made errors of warnings, and modules
    that start threads cannot be loaded any more.
    """
    speaks = _copy_stderr()
    try:
        told = subprocess.run(
            [sys.executable, "-P", "-m", "retrograd.explaining.launch.explaining", str(run), shown, *map(str, speaks)],
            env=make_own_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=speaks,
            encoding="utf-8",
            timeout=LIMITS.verdict_seconds,
            start_new_session=True,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return f"; what is wrong, if anything, tells: retrograd explain {shown}"
    except (OSError, ValueError, subprocess.SubprocessError, KeyboardInterrupt):
        return ""
    finally:
        for number in speaks:
            os.close(number)
    return told.stdout


def _copy_stderr() -> list[int]:
    """A file on which that process says how far it is, if there is one; its warnings go nowhere."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return [os.dup(sys.__stderr__.fileno())]  # type: ignore[union-attr]
    return []


def _await_mirror() -> None:
    """Wait for the process that tells a tracker of the run."""
    number = os.environ.get(MIRROR, "")
    end = time.monotonic() + LIMITS.mirror_seconds
    with contextlib.suppress(KeyboardInterrupt):
        while number.isdecimal() and is_alive(int(number)):
            if time.monotonic() >= end:
                within = f"{LIMITS.mirror_seconds:.0f} seconds"
                say(f"the tracker has not taken all within {within}; process {number} goes on")
                return
            time.sleep(_LOOK)


def _say_failure(run: Path, command: Sequence[str]) -> None:
    """Report which backward pass has ended the run, of this process or of one below it, and what explains it."""
    error = _find_failed_pass(run)
    if error is not None:
        where = f" in {error['node']}" if error["node"] else ""
        last = f", after {error['module']} had its gradient" if error["module"] else ""
        explain = shlex.join(("retrograd", "trace", *command))
        say(f"a backward pass raised {error['kind']}{where}{last}; see which operation, and what came in: {explain}")


def _is_explained(run: Path) -> bool:
    """Return whether a finding says more of a failure than that the run has died."""
    try:
        found = [json.loads(line) for line in (run / FINDINGS).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):  # there are none, or it is being written
        return False
    return any(each.get("severity") == "critical" and each.get("detector") != "failed" for each in found)


def _find_failed_pass(run: Path) -> dict[str, Any] | None:
    """Find the first exception that a backward pass has raised."""
    for path in sorted(run.glob("rank*/rank.json")):
        with contextlib.suppress(OSError, ValueError):  # it is being written, or no process of ours has written it
            error = json.loads(path.read_text(encoding="utf-8")).get("error")
            if error and error["in_backward"] and error["kind"] != "KeyboardInterrupt":
                return dict(error)
    return None


def is_reporting_process() -> bool:
    """Return whether this process reports for all."""
    return os.environ.get(SPEAKER) == str(os.getpid())
