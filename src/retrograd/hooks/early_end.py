"""Ending a forward before its end, once everything that is wanted of it has been seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from retrograd.hooks.engine import grad_enabled

_TIDY_UP = frozenset({"FullyShardedDataParallel", "FSDPModule", "DistributedDataParallel"})
"""Wrappers that put something in order after the forward that they wrap."""

_OFFLOADED = "_hf_hook"
"""Attribute of the modules whose ``forward`` accelerate has wrapped, to bring weights in before it and out after it."""


class EarlyEnd(BaseException):
    """Ends a forward from a hook within it, and is caught by whoever began that forward.

    It is not an ``Exception``: nothing has failed, and code that handles failures need not know of it.
    """

    def __init__(self, way_out: WayOut) -> None:
        self.way_out = way_out
        super().__init__("the forward is ended: all that was asked of it has been seen")


class WayOut:
    """The way out of one forward, for its hooks; to be made right before that forward.

    It is closed where somebody would miss the end of the forward (see :func:`can_end_early`).
    """

    def __init__(self, model: nn.Module, *, wanted: bool = True) -> None:
        self._is_open = wanted and can_end_early(model)
        self._saving = _saving_hooks()

    def take(self) -> None:
        """End the forward, if the way is open.

        It is not where tensors are saved by hooks that this forward has set: a checkpointed part that never ended
        cannot be computed again.
        """
        if self._is_open and not (grad_enabled() and _saving_hooks() != self._saving):
            raise EarlyEnd(self)

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the model, and come back when it returns or a hook takes this way out."""
        try:
            model(*args, **kwargs)
        except EarlyEnd as end:
            if end.way_out is not self:  # it belongs to a forward around this one
                raise


def can_end_early(model: nn.Module) -> bool:
    """Whether nobody misses the end of a forward of this model.

    Torch calls no forward hook of the modules that an early end passes through. So there must not be any; nor a
    wrapper that has to tidy up after each forward (FSDP, DDP inside of the model, accelerate's offloading).
    """
    return not module_hooks._global_forward_hooks and not any(map(_needs_its_end, model.modules()))


def _needs_its_end(module: nn.Module) -> bool:
    return (
        bool(module._forward_hooks)
        or _OFFLOADED in vars(module)
        or any(kind.__name__ in _TIDY_UP for kind in type(module).__mro__)
    )


def _saving_hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
