"""The page of a run, served by a process of its own beside the program that is recorded. Loads without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from retrograd.errors import LaunchError
from retrograd.launch.start import make_own_environment
from retrograd.serving.server import RunServer, Served

AFTERWARDS = 10.0
"""Seconds for which a page is still answered when the program is over: it asks for the end, and for the findings."""

_BEGIN = "import os; os.fork() and os._exit(0); from retrograd.launch.beside import main; main()"
"""It forks before it loads anything: libraries with threads of their own may hang in a fork."""

_LOOK = 0.5  # seconds between two looks whether the program lives
_POLITENESS = 10  # of a process that gives way to the program


def serve_beside(run: Path) -> str:
    """Serve a run as long as this process lives, whatever program it becomes.

    The server is no child of ours: the program may wait for all that it has.

    Args:
        run: its folder, which may come later.

    Returns:
        The address.

    Raises:
        LaunchError: it cannot be served.
    """
    words = [sys.executable, "-P", "-c", _BEGIN, str(run), str(os.getpid())]
    with subprocess.Popen(
        words,
        env=make_own_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # whoever reads ours must not wait for it
        encoding="utf-8",
        start_new_session=True,
    ) as starting:
        address = starting.stdout.readline().strip() if starting.stdout else ""
    if not address:
        raise LaunchError("The page of the run cannot be served.", repair="leave --live and --open away.")
    return address


def main() -> None:
    """Serve the run of a process: both are the arguments."""
    os.nice(_POLITENESS)
    run, process = Path(sys.argv[1]), int(sys.argv[2])
    with RunServer(Served(run, is_awaited=True)) as server:
        threading.Thread(target=end_with, args=(server, process), daemon=True).start()
        print(server.address, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        server.serve_forever()


def end_with(server: RunServer, process: int) -> None:
    """End a server a little after a process."""
    while is_alive(process):
        time.sleep(_LOOK)
    time.sleep(AFTERWARDS)
    server.shutdown()


def is_alive(process: int) -> bool:
    """Tell whether there is a process of this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True
