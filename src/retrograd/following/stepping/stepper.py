"""``rg.step_through``: a backward pass that stops where it is told, and waits.

The engine runs in a thread of its own and waits there in a hook, so the thread that steps stays free: it may look,
compute, and run other passes. That thread does not know the stepper, so that a stepper that nobody holds any more can
end it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from retrograd.core.amounts import count_of
from retrograd.core.errors import StepperError
from retrograd.core.hooks.isolation import Numbering
from retrograd.core.hooks.node_tap import NodeGradients
from retrograd.core.limits import LIMITS
from retrograd.following.graph.graph import Graph
from retrograd.following.graph.node import Node
from retrograd.following.graph.origins import Origins
from retrograd.following.graph.walker import walk
from retrograd.following.stepping.breakpoints import Breakpoint, Change, Predicate, Stop, parse_breakpoint
from retrograd.following.stepping.stepped_pass import SteppedPass

Where = str | Predicate | Sequence[str | Predicate]
"""Where to stop: a breakpoint's text, a predicate on stops (a breakpoint is one), or several of these."""


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
    return Stepper(SteppedPass(graph, start, numbering), goal)


class Stepper:
    """A backward pass that one goes through by hand; see :func:`step_through`.

    It is paused before a node, or the pass is over. Iterating gives the places asked for with ``at``, from the present
    one on, and runs the pass to its end::

        for stop in rg.step_through(loss, at="blocks.3*"):
            print(stop.node.place, stop.incoming[0].norm())

    Attributes:
        graph: the graph that the pass goes through, as plain data.
    """

    def __init__(self, running: SteppedPass, goal: Predicate) -> None:
        self._pass = running
        self._goal = goal
        self._shown = -1
        self.graph = running.graph
        self._give_up = weakref.finalize(self, running.abandon, LIMITS.abandoned_seconds)
        running.start()
        self._go_on(goal)

    @property
    def stop(self) -> Stop:
        """The stop at which the pass is paused.

        Raises:
            StepperError: it is not paused.
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
    def incoming(self) -> NodeGradients:
        """The gradients that it gets."""
        return self.stop.incoming

    @property
    def saved(self) -> dict[str, Any]:
        """The tensors and values that its operation saved, see :attr:`Stop.saved`."""
        return self.stop.saved

    @property
    def ran(self) -> Node | None:
        """The node that ran last; None where none has."""
        self.stop  # noqa: B018
        index = self._pass.ran
        return None if index is None else self.graph[index]

    @property
    def outgoing(self) -> NodeGradients | None:
        """The gradients that the node that ran last, :attr:`ran`, has given."""
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
        return f"<Stepper {where}, {count_of(len(self.graph), 'node')}>"

    def _position(self) -> int:
        """Count the nodes that have run; the pass is not over."""
        return self.stop.position if self._pass.state != "running" else self._pass.position

    def _go_on(self, goal: Predicate | None) -> Stop | None:
        stop = self._pass.go_on(goal)
        if stop is None:
            self._give_up.detach()
            self._pass.close()
        return stop


def _compile(where: Where | None, graph: Graph) -> Predicate:
    """Make one question of all that was asked.

    Raises:
        NoSuchNodeError: a pattern matches no node of the graph.
        PatternError: it is not a breakpoint.
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
