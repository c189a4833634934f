"""The variable of a program by which it holds a tensor, and the line that assigns it, as its source says."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from retrograd.core.hooks.torch_calls import is_inner

_MOST = 10_000
"""Values that are looked through."""

_FEW = 16
"""Tensors of a list that are looked at, as of a state of several."""

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


class ProgramVariable(NamedTuple):
    """A variable that holds a tensor.

    Attributes:
        name: as the program writes it, as in ``state`` or ``self.state``.
        tensor: what it holds.
        line: ``file:line`` of the only statement that assigns it; empty where there are several, or none is known.
        is_made_once: that statement lies outside of the loop that runs; None where there is no loop, or no such line.
    """

    name: str
    tensor: Tensor
    line: str
    is_made_once: bool | None


def find_variable(frame: FrameType | None, is_wanted: Callable[[Tensor], bool]) -> ProgramVariable | None:
    """Find a variable that holds such a tensor: the first one of which a line is known, from this frame outwards.

    An argument has none: whoever called with it may. Locals come before attributes of the modules that they hold. No
    code of the program is run.
    """
    first = None
    for each in _list_variables(frame, is_wanted):
        first = first or each
        if each.line:
            return each
    return first


def _list_variables(frame: FrameType | None, is_wanted: Callable[[Tensor], bool]) -> Iterator[ProgramVariable]:
    while frame is not None:
        if not is_inner[frame.f_code.co_filename]:
            for name, tensor in _list_tensors(frame.f_locals):
                if is_wanted(tensor):
                    yield ProgramVariable(name, tensor, *_find_assignment(frame, name))
        frame = frame.f_back


def _list_tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    held = list(values.items())[:_MOST]
    for name, value in held:
        among = value if isinstance(value, list | tuple) and len(value) <= _FEW else (value,)
        yield from ((name, each) for each in among if isinstance(each, Tensor))
    left = _MOST
    for name, value in held:
        for path, module in _list_owners(name, value):
            for attribute, inner in list(vars(module).items()):
                left -= 1
                if isinstance(inner, Tensor):
                    yield f"{path}.{attribute}", inner
        if left < 0:
            return


def _list_owners(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module) and not isinstance(value, type):
        yield name, value
        for key, child in list(vars(value).get("_modules", {}).items()):
            yield from _list_owners(f"{name}.{key}", child)


def _find_assignment(frame: FrameType, name: str) -> tuple[str, bool | None]:
    """The only line that assigns a variable, and whether it lies outside of the loops that run in its frame."""
    file, here = frame.f_code.co_filename, frame.f_lineno
    try:
        tree = ast.parse("".join(linecache.getlines(file, frame.f_globals)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "", None
    scope = _find_scope(tree, frame)
    is_shared = any(isinstance(node, ast.Global | ast.Nonlocal) and name in node.names for node in ast.walk(tree))
    if scope is None or is_shared:
        return "", None
    nodes = list(_walk_scope(scope))
    stores = (node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    lines = {node.lineno for node in stores if node.id == name}
    if len(lines) != 1:
        return "", None
    (line,) = lines
    loops = [node for node in nodes if isinstance(node, _LOOPS) and _holds(node, here)]
    return f"{file}:{line}", not any(_holds(loop, line) for loop in loops) if loops else None


def _find_scope(tree: ast.Module, frame: FrameType) -> ast.AST | None:
    if frame.f_code.co_name == "<module>":
        return tree
    first = frame.f_code.co_firstlineno  # of the first decorator, where there are some
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    found = [each for each in functions if first in (each.lineno, *(at.lineno for at in each.decorator_list))]
    return found[0] if len(found) == 1 else None


def _walk_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """All that belongs to a scope itself, and not to one within it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _SCOPES):
            yield from _walk_scope(node)


def _holds(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
