"""Names of modules and parameters: paths in the model, without what wrappers put into them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from retrograd.core.errors import TraceError
from retrograd.core.hooks.calls import Tree
from retrograd.core.hooks.names import walk_leaves, walk_paths
from retrograd.core.sites.site import ROOT

_MANY = 32
"""Models from which on those that have died are looked for."""


class ModuleNames:
    """The names of one model's modules and parameters. It keeps none of them alive.

    Args:
        models: the model under the empty name, or several by their names.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = [(name, weakref.ref(model)) for name, model in models.items()]
        self._paths: dict[int, tuple[Callable[[], object], str | None]] = {}
        self._parameters: dict[int, tuple[Callable[[], object], str | None]] = {}
        self._read()

    def models(self) -> Iterator[tuple[str, nn.Module]]:
        """The models that are still there, with their names."""
        for name, held in self._models:
            model = held()
            if model is not None:
                yield name, model

    @property
    def is_alive(self) -> bool:
        """True if there is still something to name."""
        return any(model() is not None for _, model in self._models)

    def is_of(self, model: nn.Module) -> bool:
        """Return whether these are the names of this very model."""
        return any(mine() is model for _, mine in self._models)

    def knows(self, module: nn.Module) -> bool:
        """Return whether the module was part of it when it was last looked at."""
        held, path = self._paths.get(id(module), (None, None))
        return held is not None and held() is module and path is not None

    def path_of(self, module: nn.Module) -> str | None:
        """The path of a module, ``"self"`` for the model; None if it is not part of it."""
        return self._look_up(self._paths, module)

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The name of a parameter, as in ``"blocks.3.fc:weight"``; None if the model has no such parameter."""
        return self._look_up(self._parameters, parameter)

    def _look_up(
        self, table: dict[int, tuple[Callable[[], object], str | None]], thing: nn.Module | torch.Tensor
    ) -> str | None:
        held, name = table.get(id(thing), (None, None))
        if held is not None and held() is thing:
            return name
        self._read()  # the model may have changed
        held, name = table.get(id(thing), (None, None))
        if held is None or held() is not thing:
            table[id(thing)] = (weakref.ref(thing), None)
        return name if held is not None and held() is thing else None

    def _read(self) -> None:
        for table in (self._paths, self._parameters):
            for number in [
                number for number, (held, name) in list(table.items()) if name is not None or held() is None
            ]:
                table.pop(number, None)
        for prefix, root in self._models:
            model = root()
            for path, module in walk_paths(prefix, model) if model is not None else ():
                self._paths[id(module)] = (weakref.ref(module), path or _name_of_root(module))
            for name, parameter in walk_leaves([(prefix, model)]) if model is not None else ():
                if id(parameter) not in self._parameters:
                    self._parameters[id(parameter)] = (weakref.ref(parameter), name)


class GivenNames:
    """Names of the models that the user gave. Other modules have none."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._names = ModuleNames(models)

    def tree_of(self, module: nn.Module, *, is_recomputed: bool) -> Tree:
        return self._names

    def models(self) -> Iterator[tuple[str, nn.Module]]:
        return self._names.models()

    def name_of(self, parameter: torch.Tensor) -> str | None:
        return self._names.name_of(parameter)


class SeenNames:
    """Names relative to the outermost module that is called."""

    def __init__(self) -> None:
        self._trees: list[ModuleNames] = []

    def tree_of(self, module: nn.Module, *, is_recomputed: bool) -> Tree:
        """A part of a model that was called before keeps its name when it is called alone."""
        for tree in reversed(self._trees):
            if tree.knows(module) and (is_recomputed or (tree.is_alive and not tree.is_of(module))):
                return tree
        known = next((tree for tree in self._trees if tree.is_of(module)), None)
        return known if known is not None else self._add(module)

    def models(self) -> Iterator[tuple[str, nn.Module]]:
        for tree in self._trees:
            yield from tree.models()

    def name_of(self, parameter: torch.Tensor) -> str | None:
        names = (tree.name_of(parameter) for tree in reversed(self._trees))
        return max((name for name in names if name is not None), key=_depth, default=None)

    def _add(self, module: nn.Module) -> ModuleNames:
        if len(self._trees) >= _MANY:  # models that are made anew for each call
            self._trees = [tree for tree in self._trees if tree.is_alive]
        tree = ModuleNames({"": module})
        self._trees = [*self._trees, tree]
        return tree


def find_names(model: nn.Module | Mapping[str, nn.Module] | None) -> GivenNames | SeenNames:
    """Make names of modules: in the models given, or in those that will be called.

    Raises:
        TraceError: for anything that is not a module.
    """
    if model is None:
        return SeenNames()
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    for each in models.values():
        if not isinstance(each, nn.Module):
            raise TraceError(
                f"{each!r} is not a torch.nn.Module.",
                repair="pass the model, a dict of models by name, or nothing: "
                "with rg.trace(model) as trace: loss.backward().",
            )
    return GivenNames(models)


def _depth(name: str) -> int:
    """Rank a name by how much it says: that of a part of a model that was called by itself says the least."""
    return 0 if name.startswith(f"{ROOT}:") else len(name)


def _name_of_root(module: nn.Module) -> str:
    """A loss function of torch's own that is called outside of all models is not the model."""
    is_torchs = type(module).__module__.startswith("torch.nn.")
    has_parts = bool(module._modules) or any(True for _ in nn.Module.parameters(module))
    return type(module).__name__ if is_torchs and not has_parts else ROOT
