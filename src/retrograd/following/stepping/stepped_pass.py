"""A backward pass in a thread of its own, which waits in a hook before a node until somebody lets it go on."""

from __future__ import annotations

import contextvars
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Literal

from retrograd.core.errors import FreedGraphError
from retrograd.core.hooks.isolation import Numbering, ThreadState
from retrograd.core.hooks.node_tap import NodeGradients, NodeHooks
from retrograd.core.limits import LIMITS
from retrograd.following.graph.graph import Graph
from retrograd.following.stepping.breakpoints import Change, Predicate, Stop, apply_changes


class _AbandonedError(BaseException):
    """Raised in a hook to end a pass. Not an ``Exception``: no custom function shall catch it."""


class SteppedPass:
    """A run of the engine in a thread of its own, and what passes between that thread and others.

    Args:
        graph: the nodes that it may run.
        run_engine: runs it.
        numbering: of the nodes that the pass makes, if it makes any.

    Attributes:
        graph: those nodes; only data when the pass is over.
        state: whether the engine runs, waits, or has ended.
        stop: where it waits.
        position: how many nodes had run before the last one that began; -1 before the first.
        ran: index of the node that ran last, as long as no other has begun.
        outgoing: what that node has given.
    """

    def __init__(self, graph: Graph, run_engine: Callable[[], None], numbering: Numbering | None) -> None:
        self.graph = graph
        self.state: Literal["running", "paused", "over"] = "running"
        self.stop: Stop | None = None
        self.position = -1
        self.ran: int | None = None
        self.outgoing: NodeGradients | None = None
        self._run_engine: Callable[[], None] | None = run_engine
        self._goal: Predicate | None = None
        self._abandoned = False
        self._error: BaseException | None = None
        self._numbering = numbering
        self._begun: dict[int, tuple[weakref.ref[Stop], tuple[Change, ...] | None]] = {}
        self._thread_state: ThreadState | None = ThreadState()
        self._condition = threading.Condition()
        self._gate = threading.Lock()  # the engine has a thread for each device: one stops, and the others with it
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="retrograd-step", daemon=True)

    def start(self) -> None:
        """Start the thread; the engine runs when somebody says how far."""
        with self._condition:
            self.state = "paused"
            self._thread.start()

    def go_on(self, goal: Predicate | None) -> Stop | None:
        """Run up to the next place for which ``goal(stop)`` is true, or to the end.

        Returns:
            That place; None when the pass has ended.

        Raises:
            Exception: what the pass, or the goal, has raised.
        """
        with self._condition:
            self._goal = goal
            if self.state == "paused":
                self.state = "running"
                self._condition.notify_all()
            while self.state == "running":
                self._condition.wait(LIMITS.interrupt_seconds)
            self._goal = None  # it may hold the stepper
        if self._error is not None:
            self._raise()
        return self.stop

    def abandon(self, limit: float | None = None) -> None:
        """End the pass, and wait until it has ended, or for so many seconds."""
        with self._condition:
            self._abandoned = True
            if self.state == "paused":
                self.state = "running"
                self._condition.notify_all()
        self.close(limit)

    def close(self, limit: float | None = None) -> None:
        """Wait for the thread, and let go of everything."""
        deadline = time.monotonic() + (math.inf if limit is None else limit)
        while self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(LIMITS.interrupt_seconds)
            if time.monotonic() > deadline:
                return
        self._error = None
        numbering, self._numbering = self._numbering, None
        if numbering is not None:
            numbering.move()

    def before(self, index: int, incoming: NodeGradients) -> NodeGradients | None:
        """A node is about to run, in whatever thread of the engine's."""
        with self._gate:
            if self._abandoned:
                raise _AbandonedError
            self.position += 1
            stop = Stop(self, index, self.position, incoming)
            try:
                if self._is_reached(stop):
                    self._wait(stop)
            finally:
                stop.moment = "past"
                self.ran = self.outgoing = None  # what went out may become a ``.grad`` without a copy
            self._begun[index] = weakref.ref(stop), stop.changes
            return stop.taken

    def after(self, index: int, outgoing: NodeGradients) -> NodeGradients | None:
        """A node has run."""
        seen, changes = self._begun.pop(index)
        self.ran, self.outgoing = index, apply_changes(changes, outgoing)
        stop = seen()
        if stop is not None:
            stop.outgoing = self.outgoing
        return self.outgoing if changes is not None else None

    def _run(self) -> None:
        """Run the engine in this thread, from when it may begin."""
        hooks: NodeHooks | None = None
        try:
            with self._condition:
                while self.state == "paused":
                    self._condition.wait()
            if not self._abandoned:
                hooks = NodeHooks([self.graph.live(index) for index in range(len(self.graph))], self, alone=True)
                self._run_in_state()
        except _AbandonedError:
            pass
        except BaseException as error:  # raised where somebody waits for it
            self._error = error
        finally:
            if hooks is not None:
                hooks.remove()
            self._end()

    def _run_in_state(self) -> None:
        assert self._thread_state is not None
        assert self._run_engine is not None
        self._thread_state.enter()
        self._run_engine()

    def _end(self) -> None:
        self._run_engine = self._thread_state = self._goal = None
        self.ran = self.outgoing = None
        self._begun.clear()
        self.graph.detach()
        with self._condition:
            self.state = "over"
            self._condition.notify_all()

    def _is_reached(self, stop: Stop) -> bool:
        goal = self._goal
        try:
            return goal is not None and bool(goal(stop))
        except Exception as error:  # raised where somebody waits
            self._error = error
            return True

    def _wait(self, stop: Stop) -> None:
        with self._condition:
            self.stop = stop
            self.state = "paused"
            self._condition.notify_all()
            while self.state == "paused":
                self._condition.wait()
            self.stop = None
        if self._abandoned:
            raise _AbandonedError

    def _raise(self) -> None:
        error, self._error = self._error, None
        assert error is not None
        try:
            if self.state == "over" and isinstance(error, RuntimeError) and "second time" in str(error):
                raise FreedGraphError(
                    "The graph cannot be stepped through: an earlier backward pass has freed it.",
                    repair="call backward(retain_graph=True) in the pass before, or run the forward again.",
                ) from error
            raise error
        finally:
            if self.state == "over":
                self.close()
            del error  # a frame in its own traceback
