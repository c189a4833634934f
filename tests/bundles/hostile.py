"""Replays folders that somebody else has written, each in a process of its own, so that a crash is seen.

    python -m tests.bundles.hostile FOLDER

prints a line of JSON for each bundle in the folder: its name, and ``ok``, the slug of an error of ours with its text,
the class of any other error, or how the process ended.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import warnings
from pathlib import Path

import torch

from retrograd.bundles.replayed import replay
from retrograd.errors import RetrogradError

MEMORY = 3 << 30
"""Bytes that a replay may take besides those that torch takes already."""

SECONDS = 60


def look(folder: Path) -> tuple[str, str]:
    """What comes of replaying it."""
    try:
        str(replay(folder))
    except RetrogradError as error:
        return error.slug, error.problem
    except BaseException as error:  # is what is looked for
        return type(error).__name__, str(error)
    return "ok", ""


def look_apart(folder: Path) -> tuple[str, str]:
    """The same in a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        limit()
        os.write(writing, json.dumps(look(folder))[:60_000].encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}", ""
    slug, text = json.loads(said)
    return slug, text


def limit() -> None:
    """Let this process take so much memory and time, and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(SECONDS)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a forked process has no others
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        print(json.dumps([folder.name, *look_apart(folder)]), flush=True)


if __name__ == "__main__":
    main()
