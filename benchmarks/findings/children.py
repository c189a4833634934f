"""Scripts in children of a process that has loaded torch: what trains for a second need not load for three."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path


def load_first(texts: Iterable[str]) -> None:
    """Load here what these scripts load, as far as that is worth it."""
    import torch  # noqa: F401

    import retrograd.core.launch.session
    import retrograd.core.runs.writer  # noqa: F401

    if any("sklearn" in text for text in texts):
        import sklearn.datasets  # noqa: F401


def run_in_child(script: Path, log: Path, begin: Callable[[], None], limit: float) -> int:
    """Run a script as ``__main__`` in a fork of this process, in its folder.

    Args:
        script: an absolute path.
        log: what it prints goes there.
        begin: called first, in the child.
        limit: seconds; what takes longer is ended.

    Returns:
        Its exit code.
    """
    child = os.fork()
    if not child:
        code = 1
        try:
            code = _run(script, log, begin)
        finally:
            os._exit(code)
    return _wait(child, limit)


def _run(script: Path, log: Path, begin: Callable[[], None]) -> int:
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(script.parent)
    sys.argv = [str(script)]
    sys.path[0] = str(script.parent)
    code = 0
    try:
        begin()
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code


def _wait(child: int, limit: float) -> int:
    end = time.monotonic() + limit
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return 124
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(ended[1])
