"""How gradients are reduced over processes.

DDP leaves in ``.grad`` the mean over all processes once a pass is over, or, under ``no_sync()``, what this process has
found alone. FSDP2 puts this process's part of the mean there, and without reduction nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from retrograd.core.hooks.module import CallTap
from retrograd.core.hooks.names import fsdp_groups, fsdp_parameters
from retrograd.core.hooks.parts import modules_of
from retrograd.core.identities import IdentitySet
from retrograd.core.ranks.stages import is_reduced_by_stage, is_rehearsal


class Exchange:
    """A reduction of the gradients of some parameters over all processes.

    Attributes:
        ranks: the processes that get the very same gradients; empty where each gets a part.
    """

    ranks: tuple[int, ...] = ()

    def __init__(self, parameters: Collection[Tensor]) -> None:
        self._parameters = WeakIdKeyDictionary(dict.fromkeys(parameters))

    def reduces(self, parameter: Tensor) -> bool:
        """Return whether the gradient of this parameter is among them."""
        return parameter in self._parameters

    def has_begun(self) -> bool:
        """Return whether the reduction of gradients that came in a pass has begun; asked after such a pass."""
        return True

    def has_ended(self) -> bool:
        """Return whether all gradients have been reduced."""
        return True

    def find_wholes(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Each parameter of which a process holds a part, and the whole one that graphs end at, where there is one."""
        return ()

    def close(self) -> None:
        """Begin anew: the reduced gradients have been seen."""

    def remove(self) -> None:
        """Take all hooks away."""


class Sharding(Exchange):
    """FSDP2: a gradient that is there is reduced. What a process finds itself comes at the whole parameter.

    Args:
        modules: those at which parameters are sharded; they are not held.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        super().__init__([each.parameter for module in modules for each in fsdp_parameters(module)])
        self._modules = IdentitySet(modules)

    def find_wholes(self) -> Iterator[tuple[Tensor, Tensor]]:
        for module in list(self._modules):
            for each in fsdp_parameters(module):
                if each.whole is not None:
                    yield each.parameter, each.whole


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
        if torch.is_grad_enabled() and module.require_backward_grad_sync and not is_rehearsal():
            self._is_due = True

    def after_call(self, module: nn.Module, output: Any) -> None:
        """Do nothing at the end of a call."""

    def has_begun(self) -> bool:
        return self._is_due or is_reduced_by_stage(self._wrapper())

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


def find_sharding(model: nn.Module) -> Sharding | None:
    """Find out whether FSDP2 reduces gradients of a model."""
    modules = [module for module in modules_of(model) if fsdp_groups(module)]
    return Sharding(modules) if modules else None


def is_averaging(module: nn.Module) -> bool:
    """Return whether it is a ``DistributedDataParallel`` of several processes; one alone has nothing to reduce."""
    return type(module).__name__ == "DistributedDataParallel" and module.process_group.size() > 1  # type: ignore[operator]


def running_wrapper() -> nn.Module | None:
    """The ``DistributedDataParallel`` whose forward runs now."""
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    return parallel.DistributedDataParallel._active_ddp_module if parallel is not None else None
