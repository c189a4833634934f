"""``rg.trace``: every node of every backward pass, with its time, its place in the forward, and how it failed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Container, Mapping
from operator import attrgetter
from types import TracebackType

from torch import Tensor, nn

from retrograd.core.addresses import local_folder
from retrograd.core.errors import TraceError
from retrograd.core.guesses import names_arguments
from retrograd.core.hooks.backward import EngineRun, backward_followers
from retrograd.core.hooks.checkpoints import is_failure
from retrograd.core.hooks.listeners import never_raise
from retrograd.core.hooks.names import watched_name
from retrograd.core.hooks.node_tap import NodeTaps
from retrograd.core.ranks.processes import ask_rank
from retrograd.following.graph.origins import Origins, record_origins
from retrograd.following.graph.walker import name_leaves
from retrograd.following.tracing.pass_log import PassLog, place_finder
from retrograd.following.tracing.trace import NodeEvent, Trace, nothing_new
from retrograd.following.tracing.traced_pass import INCOMPLETE, TracedPass, TraceOptions, find_source, is_said_of_hook

Model = nn.Module | Mapping[str, nn.Module]


@names_arguments
def trace(
    model: Model | None = None,
    *,
    origins: bool | Origins = True,
    norms: bool = False,
    memory: bool = False,
    live: Callable[[NodeEvent], None] | None = None,
    passes: int | Container[int] | None = None,
    bundle: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    resumable: bool = False,
    limit: int = 1_000_000,
    names: Mapping[str, Tensor] | None = None,
) -> Tracing:
    """Trace every node of every backward pass of the process.

    Tracing changes nothing: results are bitwise the same, and the program's own hooks run as ever. When a pass raises,
    the exception goes on with a note that names the node, its module and line, what came in, and a replay bundle.

    ::

        with rg.trace() as trace:
            loss = model(x)
            loss.backward()
        rg.print_trace(trace)

    Args:
        model: names modules and leaves; the outermost module that is called by default.
        origins: find the module call and the source line of each node. The forward must run inside of the ``with``.
        norms: measure what goes into each node and what comes out. It is read when the trace is.
        memory: measure how many bytes each node gains: on a GPU what torch has allocated, else what the process has.
        live: called with the event of each node when it has run.
        passes: how many outermost passes to trace, or the numbers of those to trace, from 0; None for all.
        bundle: write a replay bundle of each node that this glob matches.
        folder: where bundles are written; by default a new temporary folder ``retrograd-bundle-*``, made when there is
            one to write. It stays: the note of the exception names it.
        resumable: keep gradients until the node that they go to has run, so that a pass that failed can be finished:
            ``trace.pending.resume()``.
        limit: how many nodes to note; what runs later is only counted.
        names: names leaves that are not parameters: ``{"a": a}``. Those that were handed to ``rg.watch("a", a)`` have
            the name ``watch/a``.

    Raises:
        TraceError: for a limit or a number of passes below 1.
        GraphError: what was given a name is not a tensor.
    """
    if limit < 1 or (isinstance(passes, int) and passes < 1):
        raise TraceError("A trace of nothing was asked for.", repair="give a limit and a number of passes above 0.")
    options = TraceOptions(
        norms=norms,
        memory=memory,
        live=live,
        passes=range(passes) if isinstance(passes, int) else passes,
        bundle=bundle,
        folder=local_folder(folder) if folder is not None else None,
        resumable=resumable,
        limit=limit,
    )
    if isinstance(origins, Origins):
        return Tracing(model, options, origins, names=names, owns_origins=False)
    return Tracing(model, options, record_origins(model, writes=True) if origins else None, names=names)


class Tracing:
    """A trace that is being made: entering it gives the :class:`Trace`, and leaving it ends it.

    Attributes:
        trace: what has been seen so far.
    """

    def __init__(
        self,
        model: Model | None,
        options: TraceOptions,
        origins: Origins | None,
        *,
        names: Mapping[str, Tensor] | None = None,
        owns_origins: bool = True,
    ) -> None:
        self.trace = Trace(ask_rank(), time.time_ns() - time.perf_counter_ns())
        self._options = options
        self._origins = origins
        self._owns_origins = owns_origins and origins is not None
        self._leaves = name_leaves(model, names)
        self._find_place = place_finder(origins)
        self._unread: list[PassLog] = []
        self._running: dict[EngineRun, TracedPass] = {}
        self._taps = NodeTaps()
        self._outermost = 0
        self._count = 0
        self._is_left = False
        self._lock = threading.RLock()

    def __enter__(self) -> Trace:
        if self._owns_origins and self._origins is not None:
            self._origins.__enter__()
        self.trace._refresh = self._refresh
        self.trace.origins = self._origins
        backward_followers.add(self)
        return self.trace

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        backward_followers.remove(self)
        if self._owns_origins and self._origins is not None:
            self._origins.__exit__(kind, error, traceback)
        with self._lock:
            self._is_left = True
            self._let_go()

    def _let_go(self) -> None:
        """Leave the trace to itself: when no pass runs any more that began inside of the block."""
        self._refresh()
        if not self._running:
            self.trace._refresh = nothing_new  # ours holds us, and we hold the trace

    @property
    def is_over(self) -> bool:
        """Whether all passes that were asked for by their number have ended."""
        with self._lock:
            passes = self._options.passes
            return isinstance(passes, range) and self._outermost >= passes.stop and not self._running

    @never_raise(INCOMPLETE)
    def run_begins(self, run: EngineRun) -> None:
        """Begin to trace a run of the engine."""
        with self._lock:
            self._begin(run)

    @never_raise(INCOMPLETE)
    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """End the trace of a run."""
        watched = self._running.get(run)
        if watched is None:
            return
        try:
            watched.end(failed=is_failure(error))
            if is_failure(error) and isinstance(error, Exception):
                self._explain(watched, error)
        finally:
            try:
                watched.close()
            finally:
                self._end(run, watched.log)

    def _explain(self, watched: TracedPass, error: Exception) -> None:
        failure = watched.explain(error, self._origins)
        if failure is not None:
            self.trace.failure = failure
            self.trace.pending = watched.pending
            error.add_note(failure.note())
        elif (source := find_source(error)) or is_said_of_hook(error):
            where = f"\n  raised by Python code: {source}" if source else ""
            error.add_note(f"retrograd: backward failed in a hook on a tensor that it began with{where}")

    def _begin(self, run: EngineRun) -> None:
        thread = threading.get_ident()
        depth = sum(watched.log.thread == thread for watched in self._running.values())
        number = self._outermost
        self._outermost += not run.is_nested
        if run.is_batched or (run.is_nested and not depth):
            return
        if depth == 0 and self._options.passes is not None and number not in self._options.passes:
            return
        log = PassLog(len(self.trace.passes), depth)
        watched = TracedPass(run, log, self._options, self._name_leaf, self._find_place, self._taps)
        self.trace.passes.append(log.summary())
        self._running[run] = watched

    def _end(self, run: EngineRun, log: PassLog) -> None:
        with self._lock:
            del self._running[run]
            self.trace.passes[log.number] = log.summary()
            if self._count >= self._options.limit:
                self.trace.dropped += len(log)
            else:
                self._count += len(log)
                self._unread.append(log)
            if self._is_left:
                self._let_go()

    def _name_leaf(self, leaf: Tensor) -> str | None:
        name: str | None = self._leaves.get(leaf)
        if name is None and self._origins is not None:
            name = self._origins.name_parameter(leaf)
        return watched_name(leaf) if name is None else name

    def _refresh(self) -> None:
        """Make events of what was only noted so far."""
        with self._lock:
            unread, self._unread = self._unread, []
            for log in unread:
                self.trace._events += log.events(self._find_place)
            if unread:
                self.trace._events.sort(key=attrgetter("begin"))  # a pass inside another ends before it
            if unread and self._origins is not None:
                self.trace._forwards = list(self._origins.spans)
