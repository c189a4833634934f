"""Runs that go on, and a server of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from retrograd.core.history.sink import Event, Moment
from retrograd.core.serving.server import RunServer, Served
from tests.core.history.made import make_steps
from tests.core.runs.written import add_step, open_writer, write_run
from tests.processes import wait_for_child


class Training:
    """A process that writes steps, slowly, until it is killed."""

    def __init__(self, path: Path) -> None:
        self._child = os.fork()
        if self._child == 0:
            try:
                _train(path)
            finally:
                os._exit(1)

    def kill(self) -> None:
        """End it without a word."""
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            wait_for_child(self._child)
            self._child = 0


def _train(path: Path) -> None:
    writer = open_writer(path, resume=True, flush_seconds=0.2)
    for step in itertools.count(writer.next_step):
        add_step(writer, make_steps([step])[0])
        if step >= 20:
            writer.add_event(Event(Moment(step), "scalar", name="logged", value=float(step), time=time.time()))
        time.sleep(0.02)


def write_runs(folder: Path) -> Path:
    """A folder with a run that is over, and one whose name is hostile."""
    write_run(folder / "done", range(5))
    write_run(folder / "<img src=x onerror=alert(1)>", range(2))
    return folder


@contextlib.contextmanager
def serving(folder: Path, *, is_awaited: bool = False) -> Iterator[RunServer]:
    """A server of a folder, in a thread."""
    with RunServer(Served(folder, is_awaited=is_awaited)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
