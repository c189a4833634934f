"""Running other things in the middle of a forward, as if that did not run, and unseen by those who watch training.

They run on copies of models and arguments, in float64 if asked, that share nothing with what they are made of.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from retrograd.hooks.discovery import ModelDiscovery
from retrograd.hooks.nested import flatten

_saved = torch._C._autograd


@contextmanager
def unseen_by_discovery() -> Iterator[None]:
    """Within it, nobody who looks for the program's models is told of modules that run: they are none of it."""
    table = modules._global_forward_pre_hooks
    taken = {
        number: hook for number, hook in table.items() if isinstance(getattr(hook, "__self__", None), ModelDiscovery)
    }
    for number in taken:
        del table[number]
    try:
        yield
    finally:
        for number, hook in taken.items():
            if hook.__self__.armed:  # type: ignore[attr-defined]  # else it was disarmed meanwhile
                table[number] = hook


@contextmanager
def isolated_autograd() -> Iterator[None]:
    """Within it, this thread has no default hooks on saved tensors, no dispatch modes, and records gradients.

    So a checkpoint that the forward is in neither drops nor computes again what is saved here, and one that chooses
    which results to keep does not count what is run here. The default device stays.
    """
    hooks = _take_hooks()
    try:
        with _disable_current_modes(), torch.inference_mode(mode=False), torch.enable_grad():
            yield
    finally:
        for pack, unpack in reversed(hooks):
            _saved._push_saved_tensors_default_hooks(pack, unpack)


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """``torch.autograd.backward``, but nobody who listens to backward passes is told: it is none of training."""
    _engine_run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _take_hooks() -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    taken: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
    while (top := _saved._top_saved_tensors_default_hooks(False)) is not None:
        taken.append(top)
        _saved._pop_saved_tensors_default_hooks()
    return taken


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
