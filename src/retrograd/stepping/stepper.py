"""``rg.step_through``: a backward pass that stops where it is told, and waits.

The engine runs in a thread of its own and waits there in a hook, so the thread that steps stays free: it may look,
compute, and run other passes. Who steps and the engine share a ``_Pass``; the engine's thread does not know the
stepper, so that a stepper that nobody holds any more can end it.
"""

from __future__ import annotations

import contextvars
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from retrograd.errors import FreedGraphError, StepperError
from retrograd.graph.graph import Graph
from retrograd.graph.node import Node
from retrograd.graph.origins import Origins
from retrograd.graph.walker import walk
from retrograd.hooks.engine import current_graph_task
from retrograd.hooks.numbering import Numbering
from retrograd.hooks.pause import NodeHooks
from retrograd.hooks.surroundings import Surroundings
from retrograd.stepping.breakpoints import Breakpoint, Predicate, parse_breakpoint
from retrograd.stepping.stop import Change, Gradients, Stop, apply_changes

Where = str | Predicate | Sequence[str | Predicate]
"""Where to stop: a breakpoint's text, a predicate on stops (a breakpoint is one), or several of these."""

_PATIENCE = 0.1
"""Seconds after which a thread that waits looks whether it was interrupted; not all systems tell it."""

_LAST_PATIENCE = 5.0
"""Seconds that a stepper which nobody holds any more waits for a node to come to its end."""


def step_through(
    loss: Tensor | Sequence[Tensor],
    at: Where | None = None,
    *,
    gradient: Tensor | Sequence[Tensor] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Tensor | Sequence[Tensor] | None = None,
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    origins: Origins | None = None,
) -> Stepper:
    """Begin ``loss.backward()``, and stop before the first node that is meant.

    What is computed is bitwise what ``loss.backward()`` computes. All that torch keeps for each thread is in the
    engine's thread as it is in the one that calls this.

    Args:
        loss: where the pass begins; or several tensors.
        at: where to stop at first, and in a ``for`` loop; before every node by default. A text is a breakpoint such as
            ``"blocks.3*"``, ``"kind SoftmaxBackward0"`` or ``"non-finite"``.
        gradient: gradients of ``loss``, where it has more than one element.
        retain_graph: keep what the nodes have saved; the value of ``create_graph`` by default.
        create_graph: let the gradients have a graph themselves.
        inputs: add to the ``.grad`` of these only; of all leaves by default.
        model: names the leaves by its parameters.
        origins: where nodes were made, from ``rg.record_origins``.

    Returns:
        The stepper. As a context manager it runs the pass to its end when the block ends, and gives it up when the
        block raises. The pass is given up too when nobody holds the stepper any more.

    Raises:
        NoGraphError: the loss has no graph.
        NoSuchNodeError: ``at`` matches no node.
        FreedGraphError: an earlier pass has freed the graph.
    """
    tensors = (loss,) if isinstance(loss, Tensor) else tuple(loss)
    graph = walk(tensors, model=model, origins=origins, saved=False)
    goal = _compile(at, graph)

    def start() -> None:
        torch.autograd.backward(tensors, gradient, retain_graph, create_graph, inputs=inputs)

    numbering = None
    if create_graph:
        others = () if gradient is None else (gradient,) if isinstance(gradient, Tensor) else gradient
        numbering = Numbering([graph.live(index) for index in range(len(graph))], others)
    return Stepper(_Pass(graph, start, numbering), goal)


class Stepper:
    """A backward pass that one goes through by hand; see :func:`step_through`.

    It is paused before a node, or the pass is over. Iterating gives the places asked for with ``at``, from the present
    one on, and runs the pass to its end::

        for stop in rg.step_through(loss, at="blocks.3*"):
            print(stop.node.place, stop.incoming[0].norm())

    Attributes:
        graph: the graph that the pass goes through, as plain data.
    """

    def __init__(self, running: _Pass, goal: Predicate) -> None:
        self._pass = running
        self._goal = goal
        self._shown = -1
        self.graph = running.graph
        self._give_up = weakref.finalize(self, running.abandon, _LAST_PATIENCE)
        running.start()
        self._go_on(goal)

    @property
    def stop(self) -> Stop:
        """Where the pass is paused.

        Raises:
            StepperError: it is not.
        """
        stop = self._pass.stop
        if stop is None:
            raise StepperError(
                "The backward pass is over: it is paused nowhere."
                if self.is_over
                else "The backward pass runs: waiting for it was interrupted.",
                repair="begin another with rg.step_through(loss)." if self.is_over else "call step() to wait again.",
            )
        return stop

    @property
    def is_over(self) -> bool:
        """Whether the pass has ended."""
        return self._pass.state == "over"

    @property
    def node(self) -> Node:
        """The node that is about to run."""
        return self.stop.node

    @property
    def incoming(self) -> Gradients:
        """The gradients that it gets."""
        return self.stop.incoming

    @property
    def saved(self) -> dict[str, Any]:
        """What its operation saved, see :attr:`Stop.saved`."""
        return self.stop.saved

    @property
    def ran(self) -> Node | None:
        """The node that ran last; None where none has."""
        self.stop  # noqa: B018
        index = self._pass.ran
        return None if index is None else self.graph[index]

    @property
    def outgoing(self) -> Gradients | None:
        """What the node that ran last, :attr:`ran`, has given."""
        self.stop  # noqa: B018
        return self._pass.outgoing

    def set_incoming(self, *gradients: Change) -> None:
        """Let the node get these gradients instead, see :meth:`Stop.set_incoming`."""
        self.stop.set_incoming(*gradients)

    def set_outgoing(self, *gradients: Change) -> None:
        """Let these gradients go on, whatever the node will give, see :meth:`Stop.set_outgoing`."""
        self.stop.set_outgoing(*gradients)

    def step(self, count: int = 1) -> Stop | None:
        """Run the node, and stop before the next one; or run so many.

        Returns:
            Where the pass stops then; None if it has ended.

        Raises:
            StepperError: the pass is over, or the count is not positive.
            Exception: whatever the backward pass raises.
        """
        if count < 1:
            raise StepperError(f"There are no {count} steps.", repair="step(1) runs one node.")
        goal_position = self._position() + count
        return self._go_on(lambda stop: stop.position >= goal_position)

    def run_until(self, where: Where) -> Stop | None:
        """Run the node, and those after it up to the next one that is meant.

        Args:
            where: as ``at`` of :func:`step_through`. A predicate is asked in the engine's thread.

        Returns:
            Where the pass stops then; None if it has ended.

        Raises:
            NoSuchNodeError: a pattern matches no node of the graph; nothing has run.
            StepperError: the pass is over.
            Exception: whatever the backward pass raises.
        """
        self._position()
        return self._go_on(_compile(where, self.graph))

    def finish(self) -> None:
        """Run the pass to its end. Does nothing when it is over.

        Raises:
            Exception: whatever the backward pass raises.
        """
        if not self.is_over:
            self._go_on(None)

    def abandon(self) -> None:
        """End the pass without running the node.

        What has been added to ``.grad`` stays there, and the nodes that ran have freed what they had saved. Waits for
        the node that runs, if one does. Does nothing when the pass is over.
        """
        self._give_up.detach()
        self._pass.abandon()

    def __iter__(self) -> Iterator[Stop]:
        while not self.is_over:
            stop = self._pass.stop
            if stop is None or stop.position == self._shown or not self._goal(stop):
                stop = self._go_on(self._goal)
            if stop is not None:
                self._shown = stop.position
                yield stop
                del stop  # what it holds may become a ``.grad`` without a copy

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def __repr__(self) -> str:
        stop = self._pass.stop
        where = f"before {stop.node.place}" if stop is not None else self._pass.state
        return f"<Stepper {where}, {len(self.graph)} nodes>"

    def _position(self) -> int:
        """How many nodes have run, where the pass is not over."""
        return self.stop.position if self._pass.state != "running" else self._pass.position

    def _go_on(self, goal: Predicate | None) -> Stop | None:
        stop = self._pass.go_on(goal)
        if stop is None:
            self._give_up.detach()
            self._pass.close()
        return stop


class _AbandonedError(BaseException):
    """Raised in a hook to end a pass. Not an ``Exception``: no custom function shall catch it."""


class _Pass:
    """A run of the engine in a thread of its own, and what passes between that thread and others.

    Args:
        graph: the nodes that it may run.
        run_engine: runs it.
        numbering: of the nodes that the pass makes, if it makes any.
    """

    def __init__(self, graph: Graph, run_engine: Callable[[], None], numbering: Numbering | None) -> None:
        self.graph = graph
        self.state: Literal["running", "paused", "over"] = "running"
        self.stop: Stop | None = None
        self.position = -1
        self.ran: int | None = None
        self.outgoing: Gradients | None = None
        self._run_engine: Callable[[], None] | None = run_engine
        self._goal: Predicate | None = None
        self._abandoned = False
        self._error: BaseException | None = None
        self._task: int | None = None
        self._numbering = numbering
        self._begun: dict[int, tuple[weakref.ref[Stop], tuple[Change, ...] | None]] = {}
        self._surroundings: Surroundings | None = Surroundings()
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
                self._condition.wait(_PATIENCE)
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
            self._thread.join(_PATIENCE)
            if time.monotonic() > deadline:
                return
        self._error = None
        numbering, self._numbering = self._numbering, None
        if numbering is not None:
            numbering.move()

    def before(self, index: int, incoming: Gradients) -> Gradients | None:
        """A node is about to run, in whatever thread of the engine's."""
        if not self._is_ours():
            return None
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

    def after(self, index: int, outgoing: Gradients) -> Gradients | None:
        """A node has run."""
        if not self._is_ours():
            return None
        seen, changes = self._begun.pop(index)
        self.ran, self.outgoing = index, apply_changes(changes, outgoing)
        stop = seen()
        if stop is not None:
            stop.outgoing = self.outgoing
        return self.outgoing if changes is not None else None

    def _run(self) -> None:
        """What the thread does."""
        hooks: NodeHooks | None = None
        try:
            with self._condition:
                while self.state == "paused":
                    self._condition.wait()
            if not self._abandoned:
                hooks = NodeHooks([self.graph.live(index) for index in range(len(self.graph))], self)
                self._run_in_surroundings()
        except _AbandonedError:
            pass
        except BaseException as error:  # raised where somebody waits for it
            self._error = error
        finally:
            if hooks is not None:
                hooks.remove()
            self._end()

    def _run_in_surroundings(self) -> None:
        assert self._surroundings is not None
        assert self._run_engine is not None
        self._surroundings.enter()
        self._run_engine()

    def _end(self) -> None:
        self._run_engine = self._surroundings = self._goal = None
        self.ran = self.outgoing = None
        self._begun.clear()
        self.graph.detach()
        with self._condition:
            self.state = "over"
            self._condition.notify_all()

    def _is_ours(self) -> bool:
        """Whether this pass has called.

        Others may go through the same nodes: those of a checkpoint inside of this one, and those of the program while
        this one waits.
        """
        task = current_graph_task()
        if self._task is None:
            self._task = task
        return task == self._task

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


def _compile(where: Where | None, graph: Graph) -> Predicate:
    """One question out of all that was asked.

    Raises:
        NoSuchNodeError: a pattern matches no node of the graph.
        PatternError: it is no breakpoint.
    """
    if where is None:
        return lambda stop: True
    if isinstance(where, str):
        where = parse_breakpoint(where)
    if isinstance(where, Breakpoint):
        return where.within(graph)
    if callable(where):
        return where
    questions = [_compile(each, graph) for each in where]
    return lambda stop: any(question(stop) for question in questions)
