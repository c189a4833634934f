"""The trace of one process, from ``import torch`` to its end. Loaded by the bootstrap."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from torch import Tensor

from retrograd.core.amounts import count_of
from retrograd.core.errors import RetrogradError
from retrograd.core.hooks.backward import EngineRun, backward_followers
from retrograd.core.launch.pass_session import PassSession
from retrograd.core.notices import say
from retrograd.core.ranks.processes import ask_rank, is_loader_worker
from retrograd.core.runs.layout import rank_name
from retrograd.core.runs.ranks import RankClaim
from retrograd.following.hangs.watch import HangWatch, watch_hangs
from retrograd.following.launch.requests import TraceRequest
from retrograd.following.tracing.trace import Trace
from retrograd.following.tracing.tracer import Tracing, trace
from retrograd.following.views.chrome_trace import write_chrome_trace
from retrograd.following.views.trace_events import LiveLines

TRACE = "trace.json.gz"
CHROME = "chrome.json"
BUNDLES = "bundles"

_NO_NODE = "torch refused it before its first node, or computed several gradients at once (is_grads_batched)"
"""Why a pass that was asked for has no trace."""


def start_tracing_session() -> None:
    """Trace this process as ``retrograd trace`` was asked to."""
    TracingSession(TraceRequest.read(os.environ)).follow_process()


class TracingSession(PassSession):
    """Traces the backward passes that were asked for, writes them down, and says at the end what there is to see.

    The folder is made when the first pass begins: only then is the rank known, and many processes train nothing. From
    then on the last events are kept in a ring, so that ``retrograd hangs`` can tell where a pass hangs.
    """

    def __init__(self, request: TraceRequest) -> None:
        self._request = request
        self._first, self._last = request.span
        super().__init__("the tracer", f"--passes begins at number {self._first}")

    def _start(self) -> None:
        self._tracing: Tracing | None = None
        self._trace: Trace | None = None
        self._begun: dict[int, int] = {}
        """Thread → when its pass began."""
        self._due = 1
        self._written = 0
        self._ring = LateRing(self._open_folder, self._give_up)
        if self._first == 0:
            self._begin_trace()

    def backward_begins(self, roots: tuple[Tensor, ...]) -> None:
        """An outermost pass is about to run."""
        super().backward_begins(roots)
        self._begun[threading.get_ident()] = time.perf_counter_ns()

    def _count(self, failed: bool) -> None:
        number = self._ended
        self._ended += 1
        if self._tracing is not None and self._tracing.is_over:
            self._end()
        elif failed or self._count_traced() >= self._due:
            self._write()
        if self._ended == self._first:
            self._begin_trace()
        if failed and not self._has_traced():
            said = f"backward pass {number} raised, and was not traced"
            is_wanted = self._first <= number and (self._last is None or number < self._last)
            say(f"{said}: {_NO_NODE}" if is_wanted else f"{said}; see it with --passes {number}:{number + 1}")

    def _has_traced(self) -> bool:
        """Return whether the pass that has just ended in this thread was traced."""
        passes = self._trace.passes if self._trace is not None else []
        here, since = threading.get_ident(), self._begun.get(threading.get_ident(), 0)
        return any(each.thread == here and each.begin >= since for each in passes)

    def _tell_obstacle(self) -> str:
        if self._ended > self._first and not self._obstacle:
            return f"{count_of(self._ended, 'backward pass', 'backward passes')} ran: {_NO_NODE}"
        return super()._tell_obstacle()

    def _open_folder(self) -> HangWatch:
        self._claim = RankClaim(Path(self._request.path), join=True)
        return watch_hangs(self._request.path)

    def _begin_trace(self) -> None:
        request = self._request
        apart = f".p{os.getpid()}" if multiprocessing.parent_process() is not None else ""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        lines = LiveLines(request.nodes, sys.__stderr__, f"rank {ask_rank()} " if world > 1 else "")
        self._tracing = trace(
            passes=None if self._last is None else self._last - self._first,
            norms=request.norms,
            memory=request.memory or request.sort == "memory",
            live=lines if request.live else None,
            folder=Path(request.path, rank_name(ask_rank()), BUNDLES + apart),
        )
        self._trace = self._tracing.__enter__()

    def _end(self) -> None:
        """End the trace and write it down; once, but again if Ctrl-C has stopped that."""
        self._write()
        self._leave()

    def _write(self) -> None:
        """Write down what was traced so far: who is killed has what ended before.

        Each of the first passes is written when it ends, then whenever there are half as many more: all is written
        three times at most.
        """
        if self._trace is None or self._claim is None or not self._trace.passes:
            return  # where several threads begin at once, one may be done before another has made the folder
        traced = self._count_traced()
        if self._tracing is None and self._written == traced:
            return
        self._trace.rank = ask_rank()
        self._claim.move()
        self._trace.save(self._claim.folder / TRACE)
        write_chrome_trace(self._trace, self._claim.folder / CHROME)
        self._written = traced
        self._due = traced + max(1, traced // 2)

    def _count_traced(self) -> int:
        return sum(not run.depth for run in self._trace.passes) if self._trace is not None else 0

    def _stop(self) -> None:
        super()._stop()
        self._ring.close()
        self._leave()

    def _leave(self) -> None:
        tracing, self._tracing = self._tracing, None
        if tracing is not None:
            tracing.__exit__(None, None, None)

    def _tell_done(self) -> str:
        count = self._count_traced()
        return count_of(count, "backward pass", "backward passes") if count else ""

    def _show(self, file: TextIO) -> None:
        from retrograd.following.views.trace_text import print_trace

        request = self._request
        try:
            if self._trace is not None:
                print_trace(self._trace, by=request.by, sort=request.sort, nodes=request.nodes, file=file)
        except RetrogradError as error:
            say(str(error))


# ---- the ring of last events ----


class LateRing:
    """Waits for a pass, opens the ring, and tells it of that pass, of which torch's wrapper could not tell it.

    Args:
        open_ring: makes the ring; called once, when the first pass begins.
        failed: called if that raises; nothing is watched then.
    """

    def __init__(self, open_ring: Callable[[], HangWatch], failed: Callable[[Exception], None]) -> None:
        self._open_ring = open_ring
        self._failed = failed
        self._watch: HangWatch | None = None
        self._first: EngineRun | None = None
        backward_followers.add(self)

    def run_begins(self, run: EngineRun) -> None:
        """The engine is about to run."""
        if self._first is not None or is_loader_worker():
            return
        self._first = run
        try:
            self._watch = self._open_ring()
            self._watch.follower.run_begins(run)
        except Exception as error:  # a fault of ours must not stop the script
            self._failed(error)

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """The engine has run."""
        if run is self._first:
            backward_followers.remove(self)
            if self._watch is not None:
                self._watch.follower.run_ends(run, error)

    def close(self) -> None:
        """Watch no more; what is in the file stays."""
        backward_followers.remove(self)
        if self._watch is not None:
            self._watch.close()
