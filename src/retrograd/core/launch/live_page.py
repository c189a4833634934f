"""The page of a run, served by a process of its own beside the program that is recorded. Loads without torch."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from retrograd.core.launch.beside import answer, is_alive, start_beside
from retrograd.core.limits import LIMITS
from retrograd.core.serving.server import RunServer, Served


def serve_beside(run: Path, *, is_opened: bool) -> tuple[str, Path]:
    """Serve a run as long as this process lives, whatever program it becomes.

    Args:
        run: its folder, which may come later.
        is_opened: write a file that leads to the page.

    Returns:
        The address, and that file.

    Raises:
        LaunchError: it cannot be served.
    """
    words = [str(run), str(os.getpid()), *(["open"] if is_opened else [])]
    address, _, file = start_beside(__name__, *words).partition(" ")
    return address, Path(file)


def main() -> None:
    """Serve the run of a process: both are the arguments, and whether it is opened."""
    run, process = Path(sys.argv[1]), int(sys.argv[2])
    with RunServer(Served(run, is_awaited=True)) as server:
        threading.Thread(target=end_with, args=(server, process), daemon=True).start()
        answer(f"{server.address} {server.write_redirect()}" if sys.argv[3:] else server.address)
        server.serve_forever()


def end_with(server: RunServer, process: int) -> None:
    """End a server a little after a process."""
    while is_alive(process):
        time.sleep(LIMITS.page_pause)
    time.sleep(LIMITS.page_seconds)
    server.shutdown()
