"""Both runs of what a checkpoint computes twice: in the forward, and again in the backward pass.

Torch's two checkpoints are seen alike: the reentrant one by the function that it is given, the other by the generator
that sets its hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol

from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

from retrograd.core.hooks.engine import grad_enabled, is_tracing
from retrograd.core.hooks.listeners import Listeners, Patch, Undo, replace


class TwoRuns(Protocol):
    """Around both runs of one part; may be asked for further ones, of a graph that is kept."""

    def first(self) -> AbstractContextManager[object]:
        """Return a block for the run in the forward."""

    def again(self) -> AbstractContextManager[object]:
        """Return a block for the run in the backward pass."""


class CheckpointListener(Protocol):
    """Told of each checkpoint. Must not raise."""

    def checkpoint_begins(self, frame: FrameType) -> TwoRuns | None:
        """A checkpoint is called, from this frame or one within; None if its runs are not to be watched."""


class _BothRuns:
    """Stands for the function of a reentrant checkpoint, which is called twice."""

    def __init__(self, function: Callable[..., Any], runs: TwoRuns) -> None:
        self._function, self._runs, self._has_run = function, runs, False

    def __call__(self, *args: Any) -> Any:
        is_again, self._has_run = self._has_run, True
        with self._runs.again() if is_again else self._runs.first():
            return self._function(*args)


def _replace_both() -> list[Undo]:
    apply: Any = CheckpointFunction.apply
    generate: Any = checkpoint._checkpoint_without_reentrant_generator
    function_class: Any = CheckpointFunction

    def apply_watched(function: Any, preserve: bool, *args: Any) -> Any:
        runs = _find_runs(sys._getframe(1))
        return apply(function if runs is None else _BothRuns(function, runs), preserve, *args)

    def generate_watched(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        runs = _find_runs(sys._getframe(1))
        return (
            generate(function, *args, **kwargs) if runs is None else _generate(generate, runs, function, args, kwargs)
        )

    function_class.apply = apply_watched

    def undo() -> None:
        if vars(CheckpointFunction).get("apply") is apply_watched:
            del function_class.apply  # the inherited one is back

    return [undo, replace(checkpoint, "_checkpoint_without_reentrant_generator", generate_watched)]


def _generate(
    generate: Callable[..., Generator[None, None, None]], runs: TwoRuns, function: Any, args: Any, kwargs: Any
) -> Generator[None, None, None]:
    def run_again(*given: Any, **named: Any) -> Any:
        with runs.again():
            return function(*given, **named)

    running = generate(run_again, *args, **kwargs)
    next(running)
    with runs.first():
        try:
            yield
        except BaseException as error:
            running.throw(error)
            raise
    yield from running


def _find_runs(frame: FrameType) -> TwoRuns | None:
    if not grad_enabled() or is_tracing():
        return None
    return next((runs for each in checkpoint_listeners if (runs := each.checkpoint_begins(frame)) is not None), None)


checkpoint_listeners = Listeners[CheckpointListener](Patch(_replace_both))
