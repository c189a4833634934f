"""At which line, and in whose call, the nodes of a forward were made: noted raw, and told when it is asked for."""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter
from types import CodeType
from typing import Any, NamedTuple

from torch import nn

from retrograd.hooks.engine import next_sequence_number
from retrograd.hooks.function_names import name_function
from retrograd.hooks.nodes import LEAF_NUMBER

_MOST = 20_000
"""Operations, and calls, that are remembered."""

_first = itemgetter(0)


class Place(NamedTuple):
    """Where a node was made.

    Attributes:
        file, line, function: of the program's; empty where that is not known.
        operation: name of the function that was called there.
        module: path of the innermost named module in whose call; empty outside of all.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    operation: str = ""
    module: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


class NodePlaces:
    """Of one thread.

    Args:
        name_module: the path of a module, None where it has no name.
    """

    def __init__(self, name_module: Callable[[nn.Module], str | None]) -> None:
        self._name_module = name_module
        self._lines: list[tuple[int, int, CodeType, int, Any]] = []
        """First number of an operation's nodes and the one after the last; code and offset of its caller; itself."""
        self._calls: list[_Call] = []
        self._open: list[_Call] = []

    def note(self, first: int, last: int, code: CodeType, offset: int, operation: Any) -> None:
        """An operation has made nodes."""
        if len(self._lines) >= _MOST:
            del self._lines[: _MOST // 2]
        self._lines.append((first, last, code, offset, operation))

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        if len(self._calls) >= _MOST:
            del self._calls[: _MOST // 2]
        call = _Call(module)
        self._calls.append(call)
        self._open.append(call)

    def leave(self, module: nn.Module) -> None:
        """That call has ended, and so have those in it that were left by Ctrl-C."""
        if any(call.module() is module for call in self._open):
            last = next_sequence_number()
            while self._open:
                call = self._open.pop()
                call.last = last
                if call.module() is module:
                    break

    def clear(self) -> None:
        """Forget everything."""
        self._lines.clear()
        self._calls.clear()
        self._open.clear()

    def find(self, number: int) -> Place:
        """Where the node with this number was made, as far as that is known."""
        if number >= LEAF_NUMBER:
            return Place()
        module = self._find_module(number)
        index = bisect_right(self._lines, number, key=_first) - 1
        if index < 0 or number >= self._lines[index][1]:
            return Place(module=module)
        _, _, code, offset, operation = self._lines[index]
        found = next(itertools.islice(code.co_positions(), offset // 2, None), (None,))[0]
        return Place(code.co_filename, found or code.co_firstlineno, code.co_name, name_function(operation), module)

    def _find_module(self, number: int) -> str:
        end = bisect_right(self._calls, number, key=_Call.begins_at)
        for call in reversed(self._calls[:end]):
            module = call.module() if call.holds(number) else None
            path = self._name_module(module) if module is not None else None
            if path:
                return path
        return ""


class _Call:
    """A call of a module, and the numbers that nodes made in it can have."""

    __slots__ = ("first", "last", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.first = next_sequence_number()
        self.last: int | None = None

    def begins_at(self) -> int:
        return self.first

    def holds(self, number: int) -> bool:
        return self.first <= number and (self.last is None or number < self.last)
