"""The last line on stderr: what has become of the recording. Loads without torch."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from retrograd.launch.request import read_request

SPEAKER = "RETROGRAD_SPEAKER"
"""Environment variable with the number of the one process that speaks, the first Python process that was started."""


def say_end(obstacle: str, recorded: str = "") -> None:
    """Say how it ended, if this is the process that speaks for all.

    Args:
        obstacle: why this process has recorded nothing.
        recorded: what it has recorded; empty for nothing. Its children may have recorded all the same.
    """
    if os.environ.get(SPEAKER) != str(os.getpid()):
        return
    request = read_request(os.environ)
    others = sum(1 for _ in Path(request.path).glob("rank*")) - bool(recorded)
    plural = "process" if others == 1 else "processes"
    if others:
        recorded = f"{recorded}, and {others} more {plural}" if recorded else f"{others} {plural}"
    if recorded:
        say(f"recorded {recorded}; see it with: retrograd report {request.shown}")
    else:
        say(f"nothing was recorded: {obstacle}")


def say(words: str) -> None:
    """One line on stderr, also where the script has put something else into ``sys.stderr``."""
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):  # nobody listens, or the script has closed it
            print(f"retrograd: {words}", file=sys.__stderr__, flush=True)
