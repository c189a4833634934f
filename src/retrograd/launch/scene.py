"""The matter of a prompt: a backward pass that is stopped, and where passes are to stop."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol

from retrograd.graph.graph import Graph
from retrograd.stepping.breakpoints import Breakpoint
from retrograd.stepping.stop import Stop

STEP = "step"
"""Reason of a stop of a pass that was only told to go so far."""


class Scene(Protocol):
    """A backward pass that is stopped, or has raised.

    Attributes:
        number: which backward pass of the process, from 1.
        why: what it was stopped for.
        error: what it has raised; None while it runs.
        ran: indices of the nodes that have run, in order.
        frame: where the script called ``backward``.
        raised_in: the innermost Python frame that raised, if the engine had called it, and its line.
    """

    number: int
    why: str
    error: BaseException | None
    ran: list[int]
    frame: FrameType | None
    raised_in: tuple[FrameType, int] | None

    @property
    def graph(self) -> Graph:
        """Its graph."""

    @property
    def stop(self) -> Stop:
        """The place of the stop."""

    @property
    def loss(self) -> tuple[Any, ...]:
        """The roots that the pass began at."""


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
