"""Calls functions in a forked process that may take so much memory and time, so that a crash is seen."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from retrograd.core.errors import RetrogradError

MEMORY = 3 << 30
"""Bytes that a call may take besides those that this process takes already."""

SECONDS = 60

Came = tuple[str, str]
"""What comes of a call: ``ok``, the slug of an error of ours, the class of any other, or how it ended; and words."""


def call_apart(functions: Mapping[str, Callable[[], object]]) -> dict[str, Came]:
    """What comes of calling each, one after the other; where one ends its process, the others go on in the next."""
    came: dict[str, Came] = {}
    while left := {name: function for name, function in functions.items() if name not in came}:
        said, end = _fork(left)
        came |= said
        if len(said) < len(left):
            came[next(name for name in left if name not in said)] = end, ""
    return came


def _fork(functions: Mapping[str, Callable[[], object]]) -> tuple[dict[str, Came], str]:
    """What came of those that could be called in one process, and how it ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            limit()
            for name, function in functions.items():
                signal.alarm(SECONDS)
                os.write(writing, json.dumps([name, *call(function)]).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = {name: (slug, text) for name, slug, text in map(json.loads, file)}
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said, f"killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"


def call(function: Callable[[], object]) -> Came:
    """The same in this process."""
    try:
        function()
    except RetrogradError as error:
        return error.slug, error.problem[:10_000]
    except BaseException as error:  # is what is looked for
        return type(error).__name__, str(error)[:10_000]
    return "ok", ""


def limit() -> None:
    """Let this process, a forked one, take so much memory and time, and no more."""
    gc.freeze()  # what was there before is not looked at, and so not copied
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends what never comes back to Python too
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
