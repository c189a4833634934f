"""Copies of models and arguments, in float64 if asked, that share nothing with what they are made of."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from retrograd.hooks.nested import flatten

T = TypeVar("T")
MakeCopy = Callable[[Tensor], Tensor]

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


def widen(tensor: Tensor) -> Tensor:
    """The tensor in float64 or complex128; integers and booleans as they are."""
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))


def clone(tensor: Tensor) -> Tensor:
    """A copy outside of every graph."""
    return tensor.detach().clone()


def clone_wide(tensor: Tensor) -> Tensor:
    """A copy in float64, outside of every graph."""
    return widen(tensor.detach()).clone()


class _Copying(TorchFunctionMode):
    """Within it, ``copy.deepcopy`` makes copies of tensors by a function of ours.

    Torch itself refuses to copy what an operation has computed: a cache of keys and values, a weight that a hook
    computes anew before each call, an activation that somebody has put aside on the module.
    """

    def __init__(self, make: MakeCopy) -> None:
        super().__init__()
        self._make = make

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = made = self._make(tensor)
        return made


def copy_nest(nest: T, make: MakeCopy) -> T:
    """A deep copy of anything that holds tensors; a tensor that occurs twice occurs twice in it.

    Args:
        nest: what to copy.
        make: the copy of one tensor.
    """
    memo: dict[int, Any] = {id(tensor): make(tensor) for _, tensor in flatten(nest, ())}
    with _Copying(make):
        return copy.deepcopy(nest, memo)


def copy_module(module: nn.Module, *, wide: bool) -> nn.Module:
    """A deep copy of a module, with the hooks that its user has set and without ours.

    Args:
        module: the module.
        wide: in float64 and complex128, plain tensors on the module included.
    """
    with _Copying(clone_wide if wide else clone):
        copied = copy.deepcopy(module)
    for parameter in copied.parameters():
        if not parameter.is_leaf:  # those of a scripted module are copied as a part of the graph, its gradients flow on
            parameter.detach_().requires_grad_()
        if wide:
            parameter.data = widen(parameter.data)
    return copied


_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def strip_hooks(module: nn.Module) -> None:
    """Take all hooks off a module and the modules in it. Only for copies: they do not come back."""
    for each in module.modules():
        for name in _TABLES:
            table: dict[int, Any] | None = vars(each).get(name)
            if table:
                table.clear()


class NoTensorHooks(TorchFunctionMode):
    """Within it, ``tensor.register_hook`` does nothing: not for the module's own code either."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.register_hook:
            return RemovableHandle(OrderedDict())
        return func(*args, **(kwargs or {}))
