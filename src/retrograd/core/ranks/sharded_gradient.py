"""Gradients of parameters that FSDP2 shards: what one pass adds to them, read and changed when the pass is over.

torch calls no hook of such a parameter. In a pass each process finds a gradient of the whole parameter, which is then
averaged, and each has its own part of the mean added to ``.grad``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from retrograd.core.hooks.names import fsdp_groups
from retrograd.core.hooks.storages import is_held_elsewhere
from retrograd.core.ranks.placements import local_part


def _nothing() -> None:
    """Find nothing."""


class ShardedGradient:
    """The ``.grad`` of one parameter, emptied while a pass runs, so that all that is in it then is of that pass.

    Args:
        parameter: the parameter, which is not held.
        group: torch's object for the parameters that are reduced with this one, which is not held; None for a
            parameter that torch's tensor parallelism has split, and nobody reduces.
        kept: torch's object for the parameter, likewise.

    Attributes:
        is_aside: a pass runs, and what ``.grad`` held before is put aside.
    """

    __slots__ = ("_aside", "_find", "_find_group", "_find_kept", "is_aside")

    def __init__(self, parameter: Tensor, group: Any = None, kept: Any = None) -> None:
        self._find = WeakIdRef(parameter)
        self._find_group = weakref.ref(group) if group is not None else _nothing
        self._find_kept = weakref.ref(kept) if kept is not None else _nothing
        self._aside: Tensor | None = None
        self.is_aside = False

    @property
    def parameter(self) -> Tensor | None:
        """The parameter; None if it is no longer there."""
        found: Tensor | None = self._find()
        return found

    @property
    def is_postponed(self) -> bool:
        """True if a pass that begins now leaves its gradient unreduced, or reduces what others have left."""
        group = self._group
        if group is None:
            return False
        if not (group.reduce_grads and group.all_reduce_grads) or group._partial_reduce_output is not None:
            return True
        kept: Any = self._find_kept()
        whole = getattr(kept, "_unsharded_param", None)
        return whole is not None and (whole.grad is not None or kept.unsharded_accumulated_grad is not None)

    @property
    def is_used_early(self) -> bool:
        """True if hooks of the program's own wait for ``.grad`` within the pass, as an optimizer in the backward."""
        parameter = self.parameter
        return self._group is not None and parameter is not None and bool(parameter._post_accumulate_grad_hooks)

    @property
    def has_earlier(self) -> bool:
        """True if ``.grad`` held something before the pass that runs."""
        return self._aside is not None

    @property
    def _group(self) -> Any:
        return self._find_group()

    def put_aside(self) -> None:
        """Empty ``.grad``: a pass begins."""
        parameter = self.parameter
        if parameter is not None and not self.is_aside:
            self._aside, parameter.grad = parameter.grad, None
            self.is_aside = True

    def read(self) -> Tensor | None:
        """What the pass has brought, once it is over; None if nothing, or if ``.grad`` was not emptied."""
        parameter = self.parameter
        if parameter is None or not self.is_aside or parameter.grad is None:
            return None
        group = self._group
        event = getattr(group, "_post_reduce_event", None)
        if event is not None:  # in a pass that is not the last of its step, torch has not waited for it
            group.device_handle.current_stream().wait_event(event)
        return parameter.grad

    @torch.no_grad()
    def put_back(self, changed: Tensor | None = None) -> None:
        """Add what the pass has brought, or ``changed`` in its place, to what there was before."""
        parameter, earlier = self.parameter, self._aside
        was_aside, self.is_aside, self._aside = self.is_aside, False, None
        if parameter is None or not was_aside:
            return
        brought = parameter.grad if changed is None else changed
        if earlier is not None:
            if brought is not None:
                local_part(earlier).add_(local_part(brought))
            parameter.grad = earlier
        elif changed is not None:  # it becomes ``.grad``, which is written into
            parameter.grad = changed.clone() if is_held_elsewhere(local_part(changed)) else changed


class ShardedParameters:
    """All parameters that FSDP2 shards in this process, as of now."""

    def __init__(self) -> None:
        self._of_place: dict[tuple[int, str], tuple[Tensor, Any, Any]] = {}
        self._of_parameter: dict[int, tuple[Tensor, Any, Any]] = {}
        for group, each in _walk_sharded():
            info = each._module_info
            places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            found = each.sharded_param, group, each
            self._of_parameter[id(each.sharded_param)] = found
            self._of_place.update({(id(module), name): found for module, name in places})

    def find(self, module: nn.Module, name: str) -> ShardedGradient | None:
        """The gradient of the parameter that a module has under a name; None if FSDP2 does not shard it."""
        found = self._of_place.get((id(module), name))
        return None if found is None else ShardedGradient(*found)

    def find_gradient(self, parameter: Tensor) -> ShardedGradient:
        """The gradient of a parameter that is a ``DTensor``."""
        return ShardedGradient(*self._of_parameter.get(id(parameter), (parameter,)))


def is_managed(module: nn.Module) -> bool:
    """Return whether FSDP may shard the parameters of a module, which it has marked."""
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def _walk_sharded() -> Iterator[tuple[Any, Any]]:
    """Each parameter as torch keeps it, beside its group."""
    composable: Any = sys.modules.get("torch.distributed._composable_state")
    modules = list(getattr(composable, "_module_state_mapping", ()))
    groups = {id(group): group for module in modules for group in fsdp_groups(module)}
    for group in groups.values():
        for parameter in group.fsdp_params:
            yield group, parameter
