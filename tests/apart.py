"""Calls a function in a forked process that may take so much memory and time, so that a crash is seen."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from retrograd.errors import RetrogradError

MEMORY = 3 << 30
"""Bytes that a call may take besides those that torch takes already."""

SECONDS = 60


def call_apart(function: Callable[[], object]) -> tuple[str, str]:
    """What comes of calling it: ``ok``, the slug of an error of ours, the class of any other, or how it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        limit()
        os.write(writing, json.dumps(call(function))[:60_000].encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}", ""
    slug, text = json.loads(said)
    return slug, text


def call(function: Callable[[], object]) -> tuple[str, str]:
    """The same in this process."""
    try:
        function()
    except RetrogradError as error:
        return error.slug, error.problem[:10_000]
    except BaseException as error:  # is what is looked for
        return type(error).__name__, str(error)[:10_000]
    return "ok", ""


def limit() -> None:
    """Let this process take so much memory and time, and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(SECONDS)
