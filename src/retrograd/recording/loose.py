"""Tensors that optimizers update and that belong to no recorded model: parameters without a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer

from retrograd.hooks.module_paths import parameter_site
from retrograd.hooks.optimizer import list_optimizers
from retrograd.recording.taps import Taps
from retrograd.sites.site import OPTIMIZER, Site


class LooseParameters:
    """Taps what optimizers hold, under ``optimizer/CLASS:GROUP.INDEX`` or the name that the optimizer was given.

    A second optimizer of the same class is ``CLASS_2``. Those that are there when the first backward pass begins are
    looked at then, when the models that have run are known and what is left is loose; later ones when they update.

    Args:
        taps: sets the hooks.
        is_known: whether a tensor is a parameter of a recorded model.
        found: told of those that are tapped.
    """

    def __init__(
        self, taps: Taps, is_known: Callable[[torch.Tensor], bool], found: Callable[[list[torch.Tensor]], None]
    ) -> None:
        self._taps = taps
        self._is_known = is_known
        self._found = found
        self._has_looked = False
        self._counts: Counter[str] = Counter()
        self._names: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        self._groups: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def look(self) -> None:
        """A backward pass begins."""
        if not self._has_looked:
            self._has_looked = True
            for optimizer in list_optimizers():
                self.see(optimizer)

    def see(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update: does it hold anything new?"""
        if self._groups.get(optimizer) == len(optimizer.param_groups):
            return
        self._groups[optimizer] = len(optimizer.param_groups)
        loose = [each for each in _list(optimizer) if not self._is_known(each[1])]
        for keys, tensor in loose:
            self._taps.tap_parameter(Site(f"{OPTIMIZER}{self._name(optimizer)}", keys), None, tensor)
        self._found([tensor for _, tensor in loose])

    def _name(self, optimizer: Optimizer) -> str:
        name = self._names.get(optimizer)
        if name is None:
            kind = type(optimizer).__name__
            self._counts[kind] += 1
            number = self._counts[kind]
            name = self._names[optimizer] = kind if number == 1 else f"{kind}_{number}"
        return name


def _list(optimizer: Optimizer) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The keys and the tensor of each parameter."""
    for number, group in enumerate(optimizer.param_groups):
        for index, tensor in enumerate(group["params"]):
            yield _make_keys(group, number, index), tensor


def _make_keys(group: Mapping[str, Any], number: int, index: int) -> tuple[str, ...]:
    names = group.get("param_names")  # of an optimizer that was made of named parameters
    if not names:
        return str(number), str(index)
    first, *rest = str(names[index]).split(".")
    return (*parameter_site(OPTIMIZER, first).keys, *rest)
