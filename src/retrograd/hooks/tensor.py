"""Watching the gradient of one tensor, at the least cost and with nothing inserted into the graph."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from retrograd.hooks.reach import FREE_DEPTH, DeepGraphGuard
from retrograd.hooks.storages import is_held_elsewhere
from retrograd.hooks.tables import Entry, SeeGradient, hooks_on

ChangeGradient = Callable[[torch.Tensor | None], torch.Tensor | None]


def watch_gradient(tensor: torch.Tensor, see: SeeGradient) -> Entry:
    """Call ``see(gradient)`` with what each pass finds for a tensor; for a leaf, before it is added to ``.grad``.

    Where tensors are pickled whole, torch says so of each hook that is not marked with ``__torch_unserializable__``.
    """
    return Entry(see, hooks_on(tensor))


def change_gradient(tensor: torch.Tensor, change: ChangeGradient) -> None:
    """Let ``change(gradient)`` take the place of a tensor's gradient, before all hooks that the tensor has by now.

    So the rules of an outer module, whose result it may be too, come before those of an inner one, and all of them
    before whoever reads. :func:`leave_gradient` takes the hook back.
    """
    table = hooks_on(tensor)
    earlier = list(table.items()) if table else ()
    table.clear()  # torch goes by the order of insertion, whatever is moved within the table
    table[change] = change
    table.update(earlier)


def leave_gradient(tensor: torch.Tensor, change: ChangeGradient) -> None:
    """Ask ``change`` no longer."""
    if tensor._backward_hooks is not None:
        tensor._backward_hooks.pop(change, None)  # type: ignore[call-overload]


def after_accumulation(leaf: torch.Tensor, see: SeeGradient) -> Callable[[], None]:
    """Call ``see(leaf)`` whenever a gradient has been added to its ``.grad``; returns what takes the hook back."""
    table: Any = leaf._post_accumulate_grad_hooks
    if table is None:
        leaf._post_accumulate_grad_hooks = table = OrderedDict()
    return Entry(see, table).remove


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether anything besides this one tensor holds the memory that its elements lie in, as far as can be seen.

    A gradient of which that is not so becomes the ``.grad`` of a parameter as it is, and is written into later.
    """
    return tensor.layout is not torch.strided or is_held_elsewhere(tensor)


class GradientWatch:
    """The hooks that one place sets on tensors, so that they can be taken back.

    ``watch(tensor)`` does what ``tensor.register_hook(see)`` does, for half its cost: the handle that torch makes for
    each hook is left out, and only the last hooked tensor's table of hooks is remembered (weakly).

    Args:
        see: called with the gradient; with None where a node has several outputs and others of them were used.
        guard: told of every node that is looked at.
        leaf_handles: gathers the handles of hooks on leaves. Those outlive the graph, so whoever owns the list removes
            them when the step is over.
        leaf_found: called when a tensor is a leaf: its gradient may become its ``.grad``, and be changed later.
    """

    __slots__ = ("_guard", "_leaf_found", "_leaf_handles", "_see", "_table")

    def __init__(
        self,
        see: SeeGradient,
        guard: DeepGraphGuard,
        leaf_handles: list[Entry],
        leaf_found: Callable[[], None] = lambda: None,
    ) -> None:
        self._see = see
        self._guard = guard
        self._leaf_handles = leaf_handles
        self._leaf_found = leaf_found
        self._table: weakref.ref[OrderedDict[Any, Any]] | None = None

    def watch(self, tensor: torch.Tensor) -> None:
        """Call ``see(gradient)`` when the gradient of this tensor, as it is now, has been computed."""
        node = tensor.grad_fn  # before the table is asked for: an in-place change of a base renews both
        if node is None:
            self._watch_leaf(tensor)
            return
        table: Any = tensor._backward_hooks
        if table is None:
            tensor._backward_hooks = table = OrderedDict()
            node._register_hook_dict(tensor)
        table[self._see] = self._see  # torch's own keys are numbers, so ours never meets one
        self._table = weakref.ref(table)
        guard = self._guard
        guard.count += 1
        if guard.count > FREE_DEPTH:
            guard.string(node)

    @property
    def is_over(self) -> bool:
        """Whether the tensor that was hooked last is gone, and its node too, so that no gradient of it can come."""
        return self._table is not None and self._table() is None

    def _watch_leaf(self, leaf: torch.Tensor) -> None:
        hooks = leaf._backward_hooks
        if hooks is None or self._see not in hooks.values():
            self._leaf_handles.append(watch_gradient(leaf, self._see))
            self._leaf_found()

    def remove(self) -> None:
        """Take back the hook that was set last."""
        table = self._table() if self._table is not None else None
        if table is not None:
            table.pop(self._see, None)
        self._table = None
