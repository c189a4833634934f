"""Looks into the ``backward`` of a Python ``Function``: which operation makes the first number that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from retrograd.hooks.engine import uncompiled_itself, without_functions
from retrograd.hooks.nodes import is_python
from retrograd.hooks.result_watch import BornOperation, ResultWatch
from retrograd.hooks.stacked_mode import StackedMode


class BackwardLook(StackedMode):
    """Is on the stack of the thread that runs the node, from the hook before it to that before the next one.

    Args:
        see: told of what makes it of finite numbers, while its frame is on the stack; what it returns is kept.
        fault: told of an error of ours; nothing is looked at behind it.
    """

    def __init__(self, see: Callable[[BornOperation], Any], fault: Callable[[Exception], None]) -> None:
        super().__init__()
        self._see = see
        self._fault = fault
        self._is_broken = False
        self._node: Any = None
        self._results = ResultWatch(self._note, lambda tensor: None)
        self._found: dict[int, Any] = {}

    def next_node(self, node: Any) -> None:
        """This node is about to run; None where the pass is over."""
        if self._node is not None:
            self.take_off()
            self._results.forget()
            self._node = None
        if node is not None and is_python(node):
            self._node = node
            self.put_on()

    def found_in(self, node: Any) -> Any:
        """What was kept of a birth in this node; None if there was none."""
        return self._found.get(id(node))

    @uncompiled_itself
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs) if kwargs else function(*args)
        if not self._is_broken and self._node is not None:
            try:
                with without_functions():
                    self._results.look(function, args, kwargs or {}, result)
            except Exception as error:
                self._is_broken = True
                self._fault(error)
        return result

    def _note(self, born: BornOperation) -> Any:
        if born.broken is None and self._node is not None:
            self._found.setdefault(id(self._node), self._see(born))
        return self._found.get(id(self._node), "")
