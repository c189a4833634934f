"""The last line on stderr: what has become of what was asked for. Loads without torch."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from retrograd.amounts import count_of

SPEAKER = "RETROGRAD_SPEAKER"
"""Environment variable with the number of the one process that speaks, the first Python process that was started."""

_ENDINGS = {
    "RETROGRAD_RUN": ("recorded", "rank*", "see it with: retrograd report {}"),
    "RETROGRAD_INVENTORY": ("taken", "rank*/inventory.html", "see it in a browser: {}/rank*/inventory.html"),
    "RETROGRAD_TRACE": ("traced", "rank*/chrome.json", "see it in ui.perfetto.dev: {}/rank*/chrome.json"),
}
"""Variable that holds a request → what was to be done, what each process that has done it leaves, how to see it."""

_VERDICT_SECONDS = 60.0
"""For how long a program that has ended is held up at most."""


def say_end(obstacle: str, done: str = "", *, saw_nothing: bool = False) -> None:
    """Say how it ended, if this is the process that speaks for all.

    Args:
        obstacle: why this process has done nothing.
        done: what it has done; empty for nothing. Its children may have done something all the same.
        saw_nothing: that is why; a child that was killed may have seen something all the same.
    """
    if not is_speaker():
        return
    asked = next((variable for variable in _ENDINGS if variable in os.environ), None)
    if asked is None:
        say(obstacle)
        return
    verb, left, see = _ENDINGS[asked]
    request = json.loads(os.environ[asked])
    folder = Path(request["path"])
    others = sum(1 for _ in folder.glob(left)) - bool(done)
    if others > 0:
        done = (
            f"{done}, and {count_of(others, 'more process', 'more processes')}"
            if done
            else f"in {count_of(others, 'process', 'processes')}"
        )
    if not done and saw_nothing and any(folder.glob("rank*")):
        obstacle = f"a backward pass began and did not end; see where with: retrograd hangs {request['shown']}"
    if not done:
        say(f"nothing was {verb}: {obstacle}")
    elif not request.get("quiet"):
        found = _ask_verdict(folder, request["shown"]) if asked == "RETROGRAD_RUN" else ""
        say(f"{verb} {done}" + (found or f"; {see.format(request['shown'])}"))


def _ask_verdict(run: Path, shown: str) -> str:
    """Ask for the verdict on a run; empty where it cannot be had.

    A process of its own tells it: in this one, which ends, the program may have made errors of warnings, and modules
    that start threads cannot be loaded any more.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RETROGRAD_", "PYTHONW"))}
    paths = [str(Path(__file__).parents[2]), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        told = subprocess.run(
            [sys.executable, "-P", "-m", "retrograd.launch.verdict", str(run), shown],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            timeout=_VERDICT_SECONDS,
            start_new_session=True,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError, KeyboardInterrupt):
        return ""
    return told.stdout


def say_failure() -> None:
    """Say which backward pass has ended the run, of this process or of one below it, and what explains it."""
    request = json.loads(os.environ.get("RETROGRAD_RUN", "null"))
    is_asked = request and not request["quiet"] and is_speaker()
    error = _find_failed_pass(Path(request["path"])) if is_asked else None
    if error is not None:
        where = f" in {error['node']}" if error["node"] else ""
        last = f", after {error['module']} had its gradient" if error["module"] else ""
        explain = shlex.join(("retrograd", "trace", *request["command"]))
        say(f"a backward pass raised {error['kind']}{where}{last}; see which operation, and what came in: {explain}")


def _find_failed_pass(run: Path) -> dict[str, Any] | None:
    """Find the first exception that a backward pass has raised."""
    for path in sorted(run.glob("rank*/rank.json")):
        with contextlib.suppress(OSError, ValueError):  # it is being written, or no process of ours has written it
            error = json.loads(path.read_text(encoding="utf-8")).get("error")
            if error and error["in_backward"] and error["kind"] != "KeyboardInterrupt":
                return dict(error)
    return None


def is_speaker() -> bool:
    """Whether this process speaks for all."""
    return os.environ.get(SPEAKER) == str(os.getpid())


def say(words: str) -> None:
    """One line on stderr, also where the script has put something else into ``sys.stderr``."""
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):  # nobody listens, or the script has closed it
            print(f"retrograd: {words}", file=sys.__stderr__, flush=True)
