"""Modules and the models that they belong to: a program often calls only a part of what it trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "_FabricModule"}


class Family:
    """The parents of every module: learnt as models are built, and from the live objects of the process.

    A copied or unpickled model never tells who its parents are: only looking at all objects finds them. What torch
    offers is asked past the modules' own classes, of which some have a ``children`` or ``parameters`` of their own.
    """

    def __init__(self) -> None:
        self._parents: WeakKeyDictionary[nn.Module, WeakSet[nn.Module]] = WeakKeyDictionary()
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._modules: WeakSet[nn.Module] = WeakSet()

    def learn(self, parent: nn.Module, child: nn.Module) -> None:
        """``child`` is a submodule of ``parent``."""
        self._parents.setdefault(child, WeakSet()).add(parent)

    def look_around(self) -> None:
        """Learn from all live objects (0.1 s for 400,000 of them)."""
        for thing in gc.get_objects():
            kind = type(thing)  # isinstance would ask the object itself, and lazy ones answer by importing things
            if issubclass(kind, Optimizer):
                self._optimizers.add(thing)
            elif issubclass(kind, nn.Module) and "_modules" in thing.__dict__:  # else it is still being made
                self._modules.add(thing)
                for child in nn.Module.children(thing):
                    self.learn(thing, child)

    @property
    def has_optimizers(self) -> bool:
        """Whether any optimizer has been seen."""
        return bool(len(self._optimizers))

    def find_model(self, module: nn.Module) -> nn.Module:
        """The model that a module is a part of, without what wraps it for distribution.

        Of several models that share the module it is the one with most of the parameters that optimizers update; of
        several such, the smallest.
        """
        tops = list(self._find_tops(module)) or [module]
        if len(tops) > 1:
            trained = self._trained_parameters()
            tops.sort(key=lambda top: _fitness(top, trained))
        return unwrap(tops[0])

    def find_trained(self, known: set[int]) -> list[nn.Module]:
        """The models that own what is trained: what optimizers update, or, without any, what requires grad.

        Args:
            known: identities of parameters whose models need not be found. A module that has none but such is
                passed over: scripting a model, say, leaves a second one with the same parameters.
        """
        known = set(known)
        trained = self._trained_parameters()
        found: dict[nn.Module, None] = {}
        for module in list(self._modules):
            own = nn.Module.parameters(module, recurse=False)
            if any(id(p) not in known and (id(p) in trained if trained else p.requires_grad) for p in own):
                model = self.find_model(module)
                found[model] = None
                known.update(map(id, nn.Module.parameters(model)))
        return list(found)

    def _trained_parameters(self) -> set[int]:
        return {id(parameter) for optimizer in list(self._optimizers) for parameter in parameters_of(optimizer)}

    def _find_tops(self, module: nn.Module) -> Iterator[nn.Module]:
        seen = {module}
        waiting = [module]
        while waiting:
            current = waiting.pop()
            parents = [parent for parent in list(self._parents.get(current, ())) if _has_child(parent, current)]
            if not parents:
                yield current
            waiting.extend(parent for parent in parents if parent not in seen)
            seen.update(parents)


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside what wraps it for distribution. A DataParallel on several devices runs copies, not the model."""
    inner = getattr(module, "module", None) if type(module).__name__ in _WRAPPERS else None
    if isinstance(inner, nn.Module) and len(getattr(module, "device_ids", None) or ()) < 2:
        return unwrap(inner)
    return module


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that an optimizer updates."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def _has_child(parent: nn.Module, child: nn.Module) -> bool:
    """Whether what was once learnt still holds."""
    return any(module is child for module in nn.Module.children(parent))


def _fitness(top: nn.Module, trained: set[int]) -> tuple[int, int]:
    own = set(map(id, nn.Module.parameters(top)))
    return -len(own & trained), len(own)
