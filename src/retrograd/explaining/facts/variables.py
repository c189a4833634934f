"""The variable of a program by which it holds a tensor, and the line that assigns it, as its source says."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from retrograd.core.frames import read_locals
from retrograd.core.hooks.nodes import number_of
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
            for name, tensor in _list_tensors(read_locals(frame)):
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


# ---- what is stored for longer ----

_STORING = frozenset({"append", "appendleft", "extend", "add", "insert", "push", "put", "setdefault", "update"})
_PLAIN = (str, bytes, int, float, complex, bool, type, ModuleType, type(None))
_DEEPEST = 3
"""Attributes and items that are followed from a variable."""


def find_holder(frame: FrameType | None, before: int) -> tuple[str, str]:
    """Find a variable, or an attribute, by which tensors with a graph are held that was made earlier.

    Args:
        frame: where to begin; then outwards.
        before: the number of the first node that is not earlier.

    Returns:
        Its name, as in ``losses`` or ``self.mean``, and the line that stores there; both are empty if there is none.
    """
    while frame is not None:
        if not is_inner[frame.f_code.co_filename]:
            left = [_MOST]
            for name, value in list(read_locals(frame).items())[:_MOST]:
                found = _find_held(value, before, _DEEPEST, left)
                if found is not None:
                    owner, attribute = found
                    whole = f"{name}.{attribute}" if attribute else name
                    return whole, _find_store(frame, name) if owner is None else _find_store_in(owner, attribute)
        frame = frame.f_back
    return "", ""


def _find_held(value: Any, before: int, depth: int, left: list[int]) -> tuple[Any, str] | None:
    """The object, and the attribute of it, that hold such a tensor; None and empty where the value itself does."""
    left[0] -= 1
    if isinstance(value, Tensor):
        return (None, "") if _is_earlier(value, before) else None
    if isinstance(value, _PLAIN) or depth == 0 or left[0] < 0:
        return None
    if isinstance(value, list | tuple | deque | dict):
        items = list(value.values()) if isinstance(value, dict) else list(value)
        return next((found for each in items[-_FEW:] if (found := _find_held(each, before, depth - 1, left))), None)
    for name, held in _attributes_of(value):
        found = _find_held(held, before, depth - 1, left)
        if found is not None:
            return (value, name) if found[0] is None else found
    return None


def _attributes_of(value: Any) -> list[tuple[str, Any]]:
    """What an object holds, without running code of the program's; nothing of functions and of torch's own objects."""
    is_foreign = str(type(value).__module__).startswith(("torch.", "retrograd.", "builtins"))
    try:
        return (
            []
            if is_foreign and not isinstance(value, nn.Module)
            else list(object.__getattribute__(value, "__dict__").items())
        )
    except AttributeError:
        return []


def _is_earlier(tensor: Tensor, before: int) -> bool:
    """Return whether its graph was made earlier; what the node of a view is may be found out only when asked."""
    if not tensor.requires_grad or tensor._is_view() or (node := tensor.grad_fn) is None:
        return False
    return number_of(node) < before


def _find_store_in(owner: Any, attribute: str) -> str:
    """The line in the class of an object that stores an attribute of it: the last, but for those of ``__init__``."""
    kind = type(owner)
    try:
        file, (lines, first) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    begun = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    stores = [each for each in _list_stores(ast.walk(tree), attribute) if not any(_holds(one, each) for one in begun)]
    return f"{file}:{max(stores) + first - 1}" if stores and file else ""


def _find_store(frame: FrameType, name: str) -> str:
    """The last line in the file of a frame that stores to a variable, or puts something into it."""
    file = frame.f_code.co_filename
    try:
        tree = ast.parse("".join(linecache.getlines(file, frame.f_globals)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    scope = _find_scope(tree, frame)
    stores = list(_list_stores(_walk_scope(scope), name)) if scope is not None else []
    return f"{file}:{max(stores)}" if stores else ""


def _list_stores(nodes: Iterable[ast.AST], name: str) -> Iterator[int]:
    """Lines that assign a name or an attribute of this name, or call ``append`` and the like of it."""
    for node in nodes:
        called = node.func if isinstance(node, ast.Call) else None
        puts = isinstance(called, ast.Attribute) and called.attr in _STORING
        target: Any = called.value if puts and isinstance(called, ast.Attribute) else node
        while isinstance(target, ast.Subscript):
            target = target.value
        is_stored = puts or isinstance(getattr(node, "ctx", None), ast.Store)
        if is_stored and name in (getattr(target, "id", ""), getattr(target, "attr", "")):
            yield node.lineno  # type: ignore[attr-defined]


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
