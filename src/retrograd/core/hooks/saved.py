"""Touches of what autograd saves: its pairs of hooks, version counters, and views of storages.

The pairs form a stack for each thread, and only the innermost is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from retrograd.core.hooks.dispatch import plain_torch
from retrograd.core.hooks.engine import dispatch_modes, is_jit_tracing, is_tracing, is_transformed
from retrograd.core.hooks.listeners import is_ours

F = TypeVar("F", bound=Callable[..., object])
Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]

_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks
read_top_pair = torch._C._autograd._top_saved_tensors_default_hooks

_are_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_transform = torch._C._functorch.peek_interpreter_stack

_STRIDED = torch.strided
_PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})
_CHECKPOINTS = frozenset(
    {
        "_checkpoint_hook.__init__.<locals>.pack_hook",
        "_recomputation_hook.__init__.<locals>.pack_hook",
        "_replace_hooks.<locals>._TellingHook.__init__.<locals>.pack_and_tell",  # of an inventory, in its place
    }
)


def not_of_the_program(pack: F) -> F:
    """Decorator for what is pushed: torch's selective checkpoints do as if no hooks of the program's were there.

    What they save passes by all hooks. From torch 2.15 on they warn where the program has set some, for later they
    will ask those.
    """
    pack._checkpoint_internal, pack._user_hooks = True, None  # type: ignore[attr-defined]
    return pack


def push_pair(pack: Pack, unpack: Unpack) -> bool:
    """Have ``pack`` called for what this thread saves from now on; False where the program has forbidden all hooks."""
    if not _are_allowed():
        return False
    _push(pack, unpack)
    return True


def remove_pair(pack: Pack) -> None:
    """Take the innermost pair with this ``pack`` off this thread's stack; those within it stay."""
    within: list[tuple[Pack, Unpack]] = []
    while (top := read_top_pair(True)) is not None:
        _pop()
        if top[0] == pack:
            break
        within.append(top)
    for pair in reversed(within):
        _push(*pair)


def top_pair() -> tuple[Pack, Unpack] | None:
    """The innermost pair of this thread."""
    return read_top_pair(True)


def belongs_to_checkpoint() -> bool:
    """Return whether what is saved now belongs to a checkpointed part: it is computed again, and need not be kept."""
    top = read_top_pair(True)
    return top is not None and getattr(top[0], "__qualname__", "") in _CHECKPOINTS


def can_recompute(module: nn.Module) -> bool:
    """Return whether torch's checkpoint can be used for this call.

    Not where hooks are forbidden, nor while ``vmap`` or the like transforms, or ``torch.jit.trace`` notes what is done;
    nor where a hook of the program comes before ours, since it would be given again what it has returned.
    """
    is_plain_call = bool(_are_allowed()) and _transform() is None and not is_jit_tracing()
    return is_plain_call and is_ours(next(iter(module._forward_pre_hooks.values()), None))


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a mere view of memory: no subclass, and not sparse, quantized, fake or batched."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is _STRIDED
        and not tensor.is_meta
        and not tensor.is_quantized
        and not is_transformed(tensor)
        and not tensor._is_zerotensor()
        and not (dispatch_modes() and is_tracing())
    )


_blanks: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def blank_like(tensor: Tensor) -> Tensor:
    """A tensor without memory, with the dtype and device of another. It is shared, and not to be written to."""
    key = (tensor.dtype, tensor.device)
    blank = _blanks.get(key)
    if blank is None:
        with plain_torch():  # whatever the program has switched on at this moment
            blank = _blanks.setdefault(key, torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    return blank


def witness_version(tensor: Tensor, make_blank: Callable[[Tensor], Tensor] = blank_like) -> Tensor:
    """A tensor without memory whose ``_version`` is always that of ``tensor``.

    Args:
        tensor: the tensor; a plain one unless another ``make_blank`` is given.
        make_blank: makes a tensor of its kind without memory.
    """
    witness = tensor.detach()
    witness.data = make_blank(tensor)  # what it shares with the tensor from here on is the counter alone
    return witness


class VersionCount:
    """Detects whether anybody has written into a tensor's memory since, without holding that memory.

    Args:
        tensor: the tensor; all views of one memory have one count.
    """

    __slots__ = ("_version", "_witness")

    def __init__(self, tensor: Tensor) -> None:
        self._witness = witness_version(tensor, lambda each: each.new_empty(0))  # subclasses too
        self._version = tensor._version

    @property
    def has_grown(self) -> bool:
        """True if there was a write."""
        return self._witness._version != self._version


def version_of(tensor: Tensor) -> int:
    """The number of writes to this memory; always 0 for a tensor that does not count."""
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode; to ask first costs more than to read
        return 0


def is_cast_of_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter in another dtype, as autocast makes it, or a view of one."""
    node = tensor.grad_fn
    for _ in range(3):  # the cast, and views of it such as a transpose
        if node is None or not node.next_functions:
            return False
        inputs = [function for function, _ in node.next_functions if function is not None]
        if len(inputs) != 1:
            return False
        if node.name() == "ToCopyBackward0":
            return isinstance(getattr(inputs[0], "variable", None), nn.Parameter)
        node = inputs[0]
    return False


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of, as autograd sees it."""
    return tensor._base


def view_storage(
    storage: torch.UntypedStorage, like: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    """A tensor in a storage, with dtype and device of ``like``, that requires no gradient."""
    return blank_like(like).data.set_(storage, offset, size, stride)


def set_bits(tensor: Tensor, *, is_conjugate: bool, is_negative: bool) -> Tensor:
    """The same memory, read as conjugate or as negative."""
    if is_conjugate:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if is_negative else tensor
