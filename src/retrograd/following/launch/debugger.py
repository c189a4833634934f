"""Backward passes that stop where a debugger was told to.

The engine runs in the thread that the script runs it in, and stops in a hook, where a prompt is opened.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from types import FrameType
from typing import Any

from retrograd.core.amounts import count_of
from retrograd.core.errors import NoSuchNodeError, RetrogradError
from retrograd.core.hooks.backward import EngineRun, backward_followers
from retrograd.core.hooks.node_tap import NodeGradients, NodeHooks
from retrograd.core.hooks.nodes import is_leaf, root_edges
from retrograd.core.hooks.reach import find_nodes, guard_nodes
from retrograd.core.hooks.torch_calls import is_stand_in, user_frame
from retrograd.core.launch.closing import say_end
from retrograd.core.notices import say
from retrograd.following.graph.graph import Graph
from retrograd.following.graph.node import holds_nonfinite
from retrograd.following.graph.origins import Origins, record_origins
from retrograd.following.graph.overwritten import explain_overwritten
from retrograd.following.graph.walker import walk
from retrograd.following.stepping.breakpoints import Breakpoint, Predicate, Stop, apply_changes

NON_FINITE = "non-finite"

STEP = "step"
"""Reason of a stop of a pass that was only told to go so far."""

ENGINE = "_engine_run_backward"
"""Name of the function of torch's that calls the engine."""


class Orders:
    """Orders where passes are to stop: breakpoints for good, and what was asked for last.

    Attributes:
        breakpoints: by number.
        revision: grows whenever they change.
        steps: stop when so many nodes have begun; None for not at all.
        until: stop there, once.
        stops: False: nowhere, ever again.
    """

    def __init__(self, breakpoints: Sequence[Breakpoint] = ()) -> None:
        self.breakpoints = dict(enumerate(breakpoints, 1))
        self.revision = 0
        self.steps: int | None = None
        self.until: Breakpoint | None = None
        self.stops = True
        self._last = len(breakpoints)

    def active(self) -> list[Breakpoint]:
        """All that is asked before each node."""
        return [*self.breakpoints.values(), *([self.until] if self.until is not None else [])]

    def add(self, point: Breakpoint) -> int:
        """Set a breakpoint; returns its number."""
        self._last += 1
        self.breakpoints[self._last] = point
        self.revision += 1
        return self._last

    def clear(self, number: int) -> Breakpoint | None:
        """Take a breakpoint away; returns it, None if there was none."""
        self.revision += 1
        return self.breakpoints.pop(number, None)

    def wait_for(self, point: Breakpoint) -> None:
        """Stop there, once."""
        self.until = point
        self.revision += 1

    def never_stop(self) -> None:
        """Let everything run on."""
        self.stops = False

    def halt(self) -> None:
        """A pass has stopped: what was asked for last is done."""
        self.steps = None
        if self.until is not None:
            self.until = None
            self.revision += 1


class Debugger:
    """Follows the backward passes of a process, and asks what to do where one stops.

    Args:
        breakpoints: where to stop.
        ask: opens the prompt; returns when the pass is to go on.
    """

    def __init__(self, breakpoints: list[Breakpoint], ask: Callable[[DebuggedPass, Orders], None]) -> None:
        self.orders = Orders(breakpoints)
        self.ask = ask
        self.origins: Origins = record_origins(writes=True)
        self.passes = 0
        self.stops = 0
        self._current: DebuggedPass | None = None
        self._is_open = False

    def start(self) -> None:
        """Follow every pass from now on."""
        self._is_open = True
        self.origins.__enter__()
        backward_followers.add(self)

    def close(self) -> None:
        """Follow none any more. Not to be called during a pass: the mode of the origins is out of its place then."""
        if self._is_open:
            self._is_open = False
            self.orders.never_stop()
            backward_followers.remove(self)
            self.origins.__exit__(None, None, None)

    def say_end(self) -> None:
        """Report if nothing was ever stopped."""
        if self.stops:
            return
        passes = count_of(self.passes, "backward pass", "backward passes")
        say_end(f"{passes} ran, and nothing was found to stop at")

    def run_begins(self, run: EngineRun) -> None:
        """Set hooks on all nodes of the pass; one pass at a time, and none inside another."""
        if not self.orders.stops:
            self.origins.clear()
            return
        if run.is_nested or run.is_batched or self._current is not None:
            return
        self.passes += 1
        try:
            self._current = DebuggedPass(self, run)
        except Exception as error:  # a fault of ours must not stop the script
            self.give_up(error)

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """Take them away, after having shown where it raised."""
        current = self._current
        if current is None or current.run is not run:
            return
        try:
            if error is not None and not isinstance(error, SystemExit) and self.orders.stops:
                current.look_back(error)
        finally:
            self._current = None
            current.close()

    def give_up(self, error: Exception) -> None:
        """Let the script run on alone."""
        self.orders.never_stop()
        problem = error.problem if isinstance(error, RetrogradError) else repr(error)
        say(f"the script runs on without the debugger: {problem}")


class DebuggedPass:
    """A backward pass with hooks on its nodes, which stops, or has raised.

    Attributes:
        number: which backward pass of the process, from 1.
        why: what it was stopped for.
        error: what it has raised; None while it runs.
        ran: indices of the nodes that have run, in order.
        frame: where the script called ``backward``.
        raised_in: the innermost Python frame that raised, if the engine had called it, and its line.
    """

    def __init__(self, debugger: Debugger, run: EngineRun) -> None:
        self.run = run
        self.number = debugger.passes
        self.frame: FrameType | None = _find_program(sys._getframe(2))
        self.error: BaseException | None = None
        self.raised_in: tuple[FrameType, int] | None = None
        self.why = ""
        self.ran: list[int] = []
        self._debugger = debugger
        self._orders = debugger.orders
        self._nodes = find_nodes(root_edges(list(run.roots))).nodes
        guard_nodes(self._nodes)
        self._stop: Stop | None = None
        self._begun: dict[int, Stop] = {}
        self._gate = threading.RLock()  # the engine has a thread for each device: one stops, and the others with it
        self._has_found = False
        self._tests: list[tuple[str, Predicate]] = []
        self._revision = -1
        self._hooks = NodeHooks(self._nodes, self, alone=True)

    def close(self) -> None:
        """Take the hooks away, and let go of everything."""
        self._hooks.remove()
        self.frame = self.error = self.raised_in = self._stop = None
        self._nodes.clear()
        self._begun.clear()
        self._tests.clear()
        self.__dict__.pop("graph", None)

    @cached_property
    def graph(self) -> Graph:
        """The graph of the pass; described when somebody asks for it."""
        return walk(list(self.run.roots), origins=self._debugger.origins, saved=False)

    @property
    def stop(self) -> Stop:
        """The stop of the pass."""
        assert self._stop is not None
        return self._stop

    @property
    def loss(self) -> tuple[Any, ...]:
        """The roots that the pass began at."""
        return self.run.roots

    def __len__(self) -> int:
        return len(self._nodes)

    def before(self, index: int, incoming: NodeGradients) -> NodeGradients | None:
        """A node is about to run: stop there, if that is wanted."""
        if not self._orders.stops:
            return None
        with self._gate:
            stop = self._begun[index] = Stop(self, index, len(self.ran), incoming)
            why = self._guarded(self._find_reason, stop)
            if why:
                self._guarded(self._ask, stop, why)
            if is_leaf(self._nodes[index]):
                stop.incoming = ()  # may become a ``.grad`` without a copy
            return stop.taken

    def after(self, index: int, outgoing: NodeGradients) -> NodeGradients | None:
        """A node has run: stop there, if what it gives is the first that is not finite."""
        with self._gate:
            stop = self._begun.pop(index, None)
            if stop is None:  # there was nothing to stop for any more when it began
                return None
            self.ran.append(index)
            stop.outgoing = apply_changes(stop.changes, outgoing)
            stop.moment = "after"
            if self._orders.stops and self._guarded(self._is_first_nonfinite, stop.outgoing):
                self._guarded(self._ask, stop, "what goes out is not finite")
            return stop.outgoing if stop.changes is not None else None

    def look_back(self, error: BaseException) -> None:
        """The pass has raised: show the node at which it was."""
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if not self._begun and not self.ran:
            say(f"backward pass {self.number} raised before its first node ran. {text}")
            return
        if self._begun:
            stop = list(self._begun.values())[-1]
        else:
            stop = Stop(self, self.ran[-1], len(self.ran) - 1, ())
            text += "\n  It was raised after this node had run, in a hook of the script."
        origins = self._debugger.origins
        overwritten = explain_overwritten([self._nodes[stop.index]], origins, origins.name_parameter)
        if overwritten is not None:
            text += f"\n  {overwritten.sentence()}\n  repair: {overwritten.repair()}"
        self.error = error
        self.raised_in = _find_frame(error)
        stop.moment = "past"
        self._ask(stop, text)

    def _guarded(self, ask: Callable[..., Any], *questions: Any) -> Any:
        """A fault of ours must not stop the script."""
        try:
            return ask(*questions)
        except Exception as error:
            self._debugger.give_up(error)
            return None

    def _is_first_nonfinite(self, gradients: NodeGradients) -> bool:
        if self._has_found or not self._wants_finite() or not holds_nonfinite(gradients):
            return False
        self._has_found = True
        return True

    def _find_reason(self, stop: Stop) -> str:
        """Why to stop here; empty if there is no reason."""
        orders = self._orders
        if orders.steps is not None:
            orders.steps -= 1
        self._update_tests()
        if self._is_first_nonfinite(stop.incoming):
            return "what comes in is not finite"
        hit = next((text for text, test in self._tests if test(stop)), None)
        if hit is not None:
            return f"breakpoint {hit}"
        return STEP if orders.steps is not None and orders.steps <= 0 else ""

    def _update_tests(self) -> None:
        """Find places in this graph, once for each change of the breakpoints."""
        if self._revision == self._orders.revision:
            return
        self._revision = self._orders.revision
        self._tests.clear()
        for point in self._orders.active():
            if point.text == NON_FINITE:
                continue
            try:
                self._tests.append((point.text, point.within(self.graph) if point.asks_place else point))
            except NoSuchNodeError:
                continue  # in another pass, perhaps

    def _wants_finite(self) -> bool:
        return any(point.text == NON_FINITE for point in self._orders.active())

    def _ask(self, stop: Stop, why: str) -> None:
        self._stop = stop
        self.why = why
        self._orders.halt()
        self._debugger.stops += 1
        try:
            self._debugger.ask(self, self._orders)
        finally:
            self._stop = None


def _find_frame(error: BaseException) -> tuple[FrameType, int] | None:
    """The innermost frame of an exception, and its line, where the engine had called Python code."""
    entry, inner = error.__traceback__, None
    is_inside = False
    while entry is not None:
        if is_inside:
            inner = entry
        if entry.tb_frame.f_code.co_name == ENGINE:
            is_inside, inner = True, None
        entry = entry.tb_next
    return (inner.tb_frame, inner.tb_lineno) if inner is not None else None


def _find_program(frame: FrameType) -> FrameType:
    """The innermost frame of the program, whose variables can be asked for, from this one outwards."""
    frame = user_frame(frame)
    while is_stand_in(frame) and frame.f_back is not None:
        frame = user_frame(frame.f_back)
    return frame
