"""Read from the code of a model that a module is called at most once in a forward.

Only code that leaves no doubt counts: ``self.fc(…)`` at one place of a class, in no loop, in a method that is called
at one place itself; the layers of an ``nn.Sequential``; ``for block in self.blocks: … block(…)``. Where ``self`` is
handed on, or modules are listed or looked up by name, nothing is known.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

from torch import nn

_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.FunctionDef)
_LOOKUPS = frozenset(
    {"children", "named_children", "modules", "named_modules", "get_submodule", "_modules", "__dict__"}
)


def is_called_once(model: nn.Module, module: nn.Module) -> bool:
    """Return whether no forward of the model can call a module of it twice."""
    paths = [path for path, each in model.named_modules(remove_duplicate=False) if each is module]
    return len(paths) == 1 and _is_way_single(model, paths[0].split(".") if paths[0] else [])


def _is_way_single(owner: nn.Module, keys: Sequence[str]) -> bool:
    outer: list[_Code] = []
    rest = list(keys)
    while rest:
        key = rest.pop(0)
        if any(code.mentions_elsewhere(key) for code in outer):
            return False
        child = owner.get_submodule(key)
        if type(owner).forward is not nn.Sequential.forward or "forward" in vars(owner):
            code = _read(type(owner))
            if code is None or "forward" in vars(owner):
                return False
            outer.append(code)
            if isinstance(child, (nn.ModuleList, nn.Sequential)) and rest and code.loops_once(key):
                child = child.get_submodule(rest.pop(0))
            elif not code.calls_once(key):
                return False
        owner = child
    return True


class _Code:
    """The methods of a class of modules.

    Args:
        methods: by name.
    """

    def __init__(self, methods: dict[str, ast.FunctionDef]) -> None:
        self._parents: dict[ast.AST, ast.AST] = {}
        self._method_of: dict[ast.AST, str] = {}
        self._attributes: list[ast.Attribute] = []
        self.is_plain = True
        for name, method in methods.items():
            for node in ast.walk(method):
                self._method_of[node] = name
                self._parents.update((child, node) for child in ast.iter_child_nodes(node))
            self._attributes += [node for node in ast.walk(method) if isinstance(node, ast.Attribute)]
            self.is_plain &= all(
                isinstance(self._parents[node], ast.Attribute)
                for node in ast.walk(method)
                if isinstance(node, ast.Name) and node.id == "self"
            )
        self.is_plain &= not any(node.attr in _LOOKUPS for node in self._attributes)

    def mentions_elsewhere(self, key: str) -> bool:
        """Return whether a part of another object has this name: ``self.block.fc``."""
        return any(node.attr == key and not _is_self(node.value) for node in self._attributes)

    def calls_once(self, key: str) -> bool:
        """Return whether ``self.key`` is called at one place, which is run once."""
        mention = self._only_mention(key)
        return mention is not None and self._is_called(mention) and self._runs_once(mention)

    def loops_once(self, key: str) -> bool:
        """Return whether ``self.key`` is looped over at one place, which is run once, and each item called once."""
        mention = self._only_mention(key)
        loop = self._parents[mention] if mention is not None else None
        if isinstance(loop, ast.Call) and isinstance(loop.func, ast.Name) and loop.func.id == "enumerate":
            loop = self._parents[loop]
        if not isinstance(loop, ast.For) or not self._runs_once(loop):
            return False
        item = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target
        uses = [
            node
            for part in loop.body
            for node in ast.walk(part)
            if isinstance(node, ast.Name) and isinstance(item, ast.Name) and node.id == item.id
        ]
        return len(uses) == 1 and self._is_called(uses[0]) and list(self._loops_around(uses[0])) == [loop]

    def _only_mention(self, key: str) -> ast.Attribute | None:
        found = [node for node in self._attributes if node.attr == key and _is_self(node.value)]
        return found[0] if self.is_plain and len(found) == 1 and not self.mentions_elsewhere(key) else None

    def _is_called(self, node: ast.AST) -> bool:
        parent = self._parents[node]
        return isinstance(parent, ast.Call) and parent.func is node

    def _runs_once(self, node: ast.AST) -> bool:
        method = self._method_of[node]
        return not any(True for _ in self._loops_around(node)) and (method == "forward" or self.calls_once(method))

    def _loops_around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Go through the loops around a node from the inside, without the method itself."""
        parent = self._parents.get(node)
        while parent is not None and parent in self._parents:
            if isinstance(parent, _LOOPS):
                yield parent
            parent = self._parents.get(parent)


_known: WeakKeyDictionary[type, _Code | None] = WeakKeyDictionary()


def _read(kind: type) -> _Code | None:
    """The code of a class; None where it has no source."""
    if kind not in _known:
        try:
            functions = {
                name: value
                for each in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)])
                for name, value in vars(each).items()
                if inspect.isfunction(value) and name != "__init__"
            }
            _known[kind] = _Code({name: _parse(function) for name, function in functions.items()})
        except (OSError, TypeError, ValueError, SyntaxError):
            _known[kind] = None
    return _known[kind]


def _parse(function: object) -> ast.FunctionDef:
    (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body  # type: ignore[arg-type]
    if not isinstance(parsed, ast.FunctionDef):
        raise ValueError("a method that is not a plain function")  # noqa: TRY004  # caught above, as one without source
    return parsed


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
