"""Looks into the ``backward`` of a Python ``Function``: which operation makes the first number that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from retrograd.hooks.engine import uncompiled, without_functions
from retrograd.hooks.function_mode import FunctionListener, FunctionMode
from retrograd.hooks.nodes import is_python
from retrograd.hooks.result_watch import BornOperation, ResultWatch


class BackwardLook(FunctionListener):
    """Its mode is on the stack of the thread that runs the node, from the hook before it to that before the next one.

    Args:
        see: told of what makes it of finite numbers, while its frame is on the stack; what it returns is kept.
        fault: told of an error of ours; nothing is looked at behind it.
    """

    def __init__(self, see: Callable[[BornOperation], Any], fault: Callable[[Exception], None]) -> None:
        self._see = see
        self._fault = fault
        self._has_failed = False
        self._mode = FunctionMode()
        self._node: Any = None
        self._results = ResultWatch(self._note, lambda tensor: None)
        self._found: dict[int, Any] = {}

    def next_node(self, node: Any) -> None:
        """This node is about to run; None where the pass is over."""
        if self._node is not None:
            self._mode.leave()
            self._results.forget()
            self._node = None
        if node is not None and is_python(node) and not self._has_failed:
            self._node = node
            self._mode.listener = self
            self._mode.put_on()

    def found_in(self, node: Any) -> Any:
        """What was kept of a birth in this node; None if there was none."""
        return self._found.get(id(node))

    @uncompiled
    def before(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the function is given."""
        return args, kwargs

    @uncompiled
    def after(self, seen: tuple[tuple[Any, ...], dict[str, Any]], function: Any, result: Any, frame: FrameType) -> None:
        """Look at what it returned."""
        if self._node is not None:
            with without_functions():
                self._results.look(function, *seen, result)

    def fail(self, error: Exception) -> None:
        """Look at nothing more."""
        self._has_failed = True
        self._fault(error)

    def _note(self, born: BornOperation) -> Any:
        if born.broken is None and self._node is not None:
            self._found.setdefault(id(self._node), self._see(born))
        return self._found.get(id(self._node), "")
