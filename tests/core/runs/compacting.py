"""A process that compacts a run and sends itself a signal before it changes the folder for the nth time."""

import os
import sys
from pathlib import Path

from retrograd.core.runs.compaction import compact

folder, signal, allowed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
left = [allowed]


def count() -> None:
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal)


unlink, replace = Path.unlink, Path.replace
Path.unlink = lambda path, **rest: (count(), unlink(path, **rest))[1]  # type: ignore[assignment, method-assign]
Path.replace = lambda path, target: (count(), replace(path, target))[1]  # type: ignore[assignment, method-assign]
compact(folder)
