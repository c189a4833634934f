"""The trace of one process, from ``import torch`` to its end. Loaded by the bootstrap."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torch import nn

from retrograd.errors import RetrogradError
from retrograd.graph.origins import Origins, record_origins
from retrograd.hangs.watch import HangWatch, watch_hangs
from retrograd.hooks.every_call import EveryCallTap
from retrograd.launch.closing import say
from retrograd.launch.late_ring import LateRing
from retrograd.launch.pass_session import PassSession
from retrograd.launch.trace_request import TraceRequest, read_trace_request
from retrograd.runs.layout import rank_name
from retrograd.runs.ranks import RankClaim, ask_rank
from retrograd.tracing.trace import Trace
from retrograd.tracing.tracer import Tracing, trace
from retrograd.views.chrome_trace import write_chrome_trace
from retrograd.views.trace_lines import LiveLines

if TYPE_CHECKING:
    from retrograd.views.trace_table import By, Measure

TRACE = "trace.json.gz"
CHROME = "chrome.json"
BUNDLES = "bundles"


def start_tracing_session() -> None:
    """Trace this process as ``retrograd trace`` was asked to."""
    TracingSession(read_trace_request(os.environ)).follow_process()


class TracingSession(PassSession):
    """Traces the backward passes that were asked for, writes them down, and says at the end what there is to see.

    The folder is made when the first pass begins: only then is the rank known, and many processes train nothing. From
    then on the last events are kept in a ring, so that ``retrograd watch`` can tell where a pass hangs.
    """

    def __init__(self, request: TraceRequest) -> None:
        super().__init__("the tracer", f"--steps begins at number {request.first}")
        self._request = request

    def _start(self) -> None:
        self._tracing: Tracing | None = None
        self._trace: Trace | None = None
        self._origins: Origins | None = None
        self._next_call: EveryCallTap | None = None
        self._due = 1
        self._ring = LateRing(self._open_folder, self._give_up)
        if self._request.first == 0:
            self._begin_trace()

    def _count(self, failed: bool) -> None:
        number, request = self._ended, self._request
        self._ended += 1
        if request.last is not None and self._ended >= request.last:
            self._end()
        elif failed or number - request.first + 1 >= self._due:
            self._write()
        if self._ended == request.first:
            self._begin_trace()
        if failed and not request.first <= number < (request.last or sys.maxsize):
            say(f"backward pass {number} raised, and was not traced; see it with --steps {number}:{number + 1}")

    def _open_folder(self) -> HangWatch:
        self._claim = RankClaim(Path(self._request.path), join=True)
        return watch_hangs(self._request.path)

    def _begin_trace(self) -> None:
        request = self._request
        apart = f".p{os.getpid()}" if multiprocessing.parent_process() is not None else ""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        lines = LiveLines(request.nodes, sys.__stderr__, f"rank {ask_rank()} " if world > 1 else "")
        self._origins = record_origins()
        self._origins.__enter__()
        self._tracing = trace(
            origins=self._origins,
            norms=request.norms,
            memory=request.memory,
            live=lines if request.live else None,
            folder=Path(request.path, rank_name(ask_rank()), BUNDLES + apart),
        )
        self._trace = self._tracing.__enter__()

    def _end(self) -> None:
        """End the trace and write it down; once, but again if Ctrl-C has stopped that."""
        if self._tracing is None or self._trace is None:
            return
        self._write()
        tracing, self._tracing = self._tracing, None
        tracing.__exit__(None, None, None)
        if self._next_call is None:
            self._next_call = EveryCallTap(self)

    def _write(self) -> None:
        """Write down what was traced so far: who is killed has what ended before.

        Each of the first passes is written when it ends, then whenever there are half as many more: all is written
        three times at most.
        """
        if self._trace is None or self._claim is None or not self._trace.passes:
            return
        self._trace.rank = ask_rank()
        self._claim.move()
        self._trace.save(self._claim.folder / TRACE)
        write_chrome_trace(self._trace, self._claim.folder / CHROME)
        traced = self._ended - self._request.first
        self._due = traced + max(1, traced // 2)

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called after the last traced pass: here the origins end.

        Not sooner, for torch puts a mode that is taken off while ``backward()`` runs on again when it returns.
        """
        self._leave_origins()

    def after_call(self, module: nn.Module, output: Any) -> None:
        """It has returned."""

    def _leave_origins(self) -> None:
        next_call, self._next_call = self._next_call, None
        if next_call is not None:
            next_call.remove()
        origins, self._origins = self._origins, None
        if origins is not None:
            origins.__exit__(None, None, None)

    def _stop(self) -> None:
        super()._stop()
        self._ring.close()
        tracing, self._tracing = self._tracing, None
        if tracing is not None:
            tracing.__exit__(None, None, None)
        self._leave_origins()

    def _tell_done(self) -> str:
        count = sum(not run.depth for run in self._trace.passes) if self._trace is not None else 0
        return f"{count} backward {'pass' if count == 1 else 'passes'}" if count else ""

    def _show(self, file: TextIO) -> None:
        from retrograd.views.trace_table import print_trace

        request = self._request
        by: By = request.by  # type: ignore[assignment]
        sort: Measure = request.sort  # type: ignore[assignment]
        try:
            if self._trace is not None:
                print_trace(self._trace, by=by, sort=sort, nodes=request.nodes, file=file)
        except RetrogradError as error:
            say(str(error))
