"""Wrappers that reduce gradients between processes during a backward pass, and whether they have done so.

DDP leaves in ``.grad`` the mean over all processes once a pass is over, or, under ``no_sync()``, what this process has
found alone. FSDP2 puts this process's part of the mean there, and without reduction nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from retrograd.hooks.module import CallTap
from retrograd.hooks.placement import walk_data_ranks
from retrograd.hooks.sharding import is_sharded


class Exchange:
    """What reduces the gradients of some parameters.

    Attributes:
        ranks: the processes that get the very same gradients; empty where each gets a part.
    """

    ranks: tuple[int, ...] = ()

    def __init__(self, parameters: Collection[Tensor]) -> None:
        self._parameters = WeakIdKeyDictionary(dict.fromkeys(parameters))

    def reduces(self, parameter: Tensor) -> bool:
        """Whether the gradient of this parameter is among them."""
        return parameter in self._parameters

    def has_begun(self) -> bool:
        """Whether gradients that have come are being reduced, or have been; asked after a pass that brought some."""
        return True

    def has_ended(self) -> bool:
        """Whether all of them have been."""
        return True

    def close(self) -> None:
        """What was reduced has been seen."""

    def remove(self) -> None:
        """Take all hooks away."""


class Sharding(Exchange):
    """FSDP2: a gradient that is there is reduced."""


class Averaging(Exchange):
    """A ``DistributedDataParallel``. It reduces in the pass after a forward with grad, outside of ``no_sync()``."""

    def __init__(self, wrapper: Any) -> None:
        ignored = wrapper.parameters_to_ignore
        super().__init__([each for name, each in wrapper.module.named_parameters() if name not in ignored])
        self.ranks = tuple(torch.distributed.get_process_group_ranks(wrapper.process_group))
        self._wrapper = weakref.ref(wrapper)
        self._is_due = False
        self._tap = CallTap(wrapper, self, outermost=True)

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The wrapper is called."""
        if torch.is_grad_enabled() and module.require_backward_grad_sync:
            self._is_due = True

    def after_call(self, module: nn.Module, output: Any) -> None:
        """That call has ended."""

    def has_begun(self) -> bool:
        return self._is_due

    def has_ended(self) -> bool:
        wrapper: Any = self._wrapper()
        if wrapper is None:
            return False
        try:
            wrapper._check_reducer_finalized()
        except RuntimeError:  # some parameters are still to have their gradients, in another pass
            return False
        return True

    def close(self) -> None:
        self._is_due = False

    def remove(self) -> None:
        self._tap.remove()


def find_exchanges(model: nn.Module) -> Iterator[Exchange]:
    """Those of a model and its modules."""
    for module in model.modules():
        if is_averaging(module):
            yield Averaging(module)
    sharded = [
        parameter
        for module, data in walk_data_ranks(model)
        for parameter in module._parameters.values()
        if data and parameter is not None and is_sharded(parameter)
    ]
    if sharded:
        yield Sharding(sharded)


def is_averaging(module: nn.Module) -> bool:
    """Whether it is a ``DistributedDataParallel`` of several processes; one alone has nothing to reduce."""
    return type(module).__name__ == "DistributedDataParallel" and module.process_group.size() > 1  # type: ignore[operator]


def running_wrapper() -> nn.Module | None:
    """The ``DistributedDataParallel`` whose forward runs now."""
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    return parallel.DistributedDataParallel._active_ddp_module if parallel is not None else None
