"""Tensors that stand in a graph for what is no tensor: a handle for a tap or a rule's hook, a run id for a run.

A graph knows a tap by its *handle*. A number or a name would be guarded, and like blocks would be compiled one by one;
with a tensor they share a graph. Another tensor, the *run id*, stands for the listeners to the gradients of one run
of a graph: the first call of a tap makes it, the others are given it, and autograd saves it with the
activations. Both are found by their address, which costs as much as an attribute, and by their content where somebody
has copied them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from retrograd.core.hooks.engine import dispatch_modes, without_functions, without_transforms
from retrograd.core.hooks.listeners import SeeGradient
from retrograd.core.hooks.saved import belongs_to_checkpoint, top_pair

T = TypeVar("T")

Listeners = dict[int, tuple[SeeGradient, ...]]
"""The listeners of the gradients in a run of a graph, by the number that a tensor has in it."""


class Numbered(Generic[T]):
    """Things, each with a tensor that stands for it in a graph.

    Args:
        dtype: one that no tensor of a program has: inductor writes into memory of the same size and dtype that is free.

    Attributes:
        by_address: the things, by the address of what their tensor holds.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.by_address: dict[int, T] = {}
        self._by_number: dict[int, T] = {}
        self._next = 0

    def add(self, thing: T) -> Tensor:
        """The tensor that stands for it from now on."""
        number = self._next
        self._next += 1
        modes = _disable_current_modes() if dispatch_modes() else nullcontext()
        with modes, without_transforms(), without_functions(), torch.inference_mode(False):
            tensor = torch.tensor([number], dtype=self._dtype, device="cpu")
        self._by_number[number] = self.by_address[tensor.data_ptr()] = thing
        weakref.finalize(tensor, self._remove, number, tensor.data_ptr()).atexit = False
        return tensor

    def find(self, tensor: Tensor) -> T | None:
        """What it stands for; None if that is gone."""
        found = self.by_address.get(tensor.data_ptr())
        return self._by_number.get(int(tensor)) if found is None else found

    def _remove(self, number: int, address: int) -> None:
        if self.by_address.get(address) is self._by_number.pop(number):
            del self.by_address[address]


_owners: Numbered[Callable[[], Any]] = Numbered(torch.int64)
_run_ids: Numbered[Listeners] = Numbered(torch.uint32)


def make_handle(owner: object) -> Tensor:
    """The handle of a tap, or of a hook that rewrites, which is not held."""
    return _owners.add(weakref.ref(owner))


def is_handle(value: Any) -> bool:
    """Return whether this is a handle."""
    is_like_one = type(value) is Tensor and value.dtype is torch.int64 and value.layout is torch.strided
    return is_like_one and value.data_ptr() in _owners.by_address


def owner_of(handle: Tensor) -> Any:
    """What a handle leads to; None if that is gone."""
    find = _find_owner(handle.data_ptr()) or _owners.find(handle)
    return find() if find is not None else None


def listeners_of(run_id: Tensor) -> Listeners | None:
    """The listeners in the run that a run id stands for."""
    listeners = _find_listeners(run_id.data_ptr())
    return _run_ids.find(run_id) if listeners is None else listeners


_find_owner, _find_listeners = _owners.by_address.get, _run_ids.by_address.get
"""What runs at each site asks here first: a call of Python's is a third of what it costs."""


def make_run_id(listeners: Listeners) -> Tensor:
    """Make the id of a run of a graph."""
    run_id = _run_ids.add(listeners)
    if top_pair() is not None and not belongs_to_checkpoint():
        _packed.append(run_id)
    return run_id


_packed: deque[Tensor] = deque(maxlen=1_000)
"""Run ids that hooks on saved tensors may copy, and leave nothing else of them."""

forget_run_ids = _packed.clear
"""Hold no run id any more, since taps have other watchers."""


NOBODY = make_run_id({})
"""The id of a run of a graph in which nobody is notified of anything more."""

SEEN = make_run_id({})
"""What a call returns that has nothing to return."""
