"""Code that may leave something behind when it runs once more: it writes to what outlives its call."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from retrograd.core.hooks.torch_calls import is_inner, is_installed, is_stand_in

_CHANGING = frozenset(
    {"append", "extend", "add", "update", "pop", "popleft", "appendleft", "setdefault", "insert", "remove", "clear",
     "write", "put", "send", "log", "log_metrics", "add_scalar", "save", "step", "copy_", "add_", "fill_", "zero_"}
)  # fmt: skip
"""Methods that change what they are called on."""

_ACTING = frozenset({"print", "open", "next", "setattr", "input", "exec"})


def leaves_something(function: Callable[..., Any]) -> bool:
    """Check whether a function, or one of its file that it calls, may change what outlives the call.

    Its own arguments may be written to: those of a trial are copies. What cannot be read may do anything.
    """
    return any(_changes(*each) for each in _list_called(inspect.unwrap(function), set()))


class CallsOfProgram:
    """Collects the code of the program's functions that this thread runs, and checks whether they leave something.

    It stands in the place of a profiler: where there is one, nothing is known.
    """

    def __init__(self) -> None:
        self._seen: dict[CodeType, dict[str, Any]] = {}
        self.is_on = False

    def start(self) -> None:
        """Begin to collect."""
        if sys.getprofile() is None and not self.is_on:
            self.is_on = True
            sys.setprofile(self._see)

    def stop(self) -> None:
        """End."""
        if self.is_on and sys.getprofile() == self._see:
            sys.setprofile(None)
        self.is_on = False

    def leave_something(self) -> bool:
        """Check what was collected; forget it."""
        seen, self._seen = self._seen, {}
        return any(_changes(code, known) for code, known in seen.items())

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and not is_installed[frame.f_code.co_filename] and not is_stand_in(frame):
            self._seen[frame.f_code] = frame.f_globals


def _list_called(function: Any, seen: set[CodeType]) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    code = getattr(function, "__code__", None)
    if code is None or code in seen or is_inner[code.co_filename]:
        return
    seen.add(code)
    yield code, function.__globals__
    for name in code.co_names:
        if isinstance(called := function.__globals__.get(name), FunctionType):
            yield from _list_called(called, seen)


def _changes(code: CodeType, known: dict[str, Any]) -> bool:
    if code.co_name in _INSIDE or code.co_filename == "<string>":  # as dataclasses and named tuples write
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return True
    nodes = ast.walk(tree)
    if code.co_name == "<lambda>":
        nodes = (inner for node in nodes if isinstance(node, ast.Lambda) for inner in ast.walk(node))
    own = {*code.co_varnames, *code.co_cellvars}
    return any(_is_change(node, own, known) for node in nodes)


_INSIDE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
"""Code that is a part of a function which runs, too."""


def _is_change(node: ast.AST, own: set[str], known: dict[str, Any]) -> bool:
    match node:
        case ast.Global() | ast.Nonlocal():
            return True
        case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
            return _root(node) not in own
        case ast.Call(func=ast.Name(id=name)):
            return name in _ACTING
        case ast.Call(func=ast.Attribute(attr=name) as called) if name in _CHANGING:
            root = _root(called)
            return root not in own and not isinstance(known.get(root), ModuleType)
    return False


def _root(node: ast.AST) -> str:
    """The name at the front of ``a.b[0].c``; of what is returned by a call, that of the function."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
