"""Code that may leave something behind when it runs once more: it writes to what outlives its call."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from retrograd.core.hooks.torch_calls import is_inner

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
    return any(_changes(each) for each in _list_called(inspect.unwrap(function), set()))


def model_leaves_something(model: nn.Module) -> bool:
    """Check the forwards of all modules that are the user's."""
    return any(leaves_something(kind.forward) for kind in {type(each) for each in model.modules()})


def _list_called(function: Any, seen: set[CodeType]) -> Iterator[FunctionType]:
    code = getattr(function, "__code__", None)
    if code is None or code in seen or is_inner[code.co_filename]:
        return
    seen.add(code)
    yield function
    for name in code.co_names:
        if isinstance(called := function.__globals__.get(name), FunctionType):
            yield from _list_called(called, seen)


def _changes(function: FunctionType) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return True
    code = function.__code__
    own = {*code.co_varnames, *code.co_cellvars}
    return any(_is_change(node, own, function.__globals__) for node in ast.walk(tree))


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
