"""Pairs of hooks of the program's for saved tensors: what ``pack`` is given, and what ``unpack`` gives for it.

Only those that are set by ``torch.autograd.graph.saved_tensors_hooks`` are seen, not those of single saved tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from retrograd.core.hooks.dispatch import plain_torch
from retrograd.core.hooks.engine import is_tracing, is_transformed, uncompiled, uncompiled_itself, without_functions
from retrograd.core.hooks.listeners import Undo, wrap_method
from retrograd.core.hooks.nodes import Held
from retrograd.core.hooks.saved import Pack, Unpack

MOST = 4096
"""Elements of a saved tensor that are compared, at equal distances."""

_PLAIN = (Tensor, torch.nn.Parameter)


class PairWatch:
    """Compares what the program's hooks give back with what they were given. Hooks of torch's are left alone.

    Args:
        is_wanted: whether what is saved now is to be compared.
        see: given ``pack``, ``unpack``, ‖difference‖ and ‖saved‖ of one tensor, which may be on a device, and whether
            ``unpack`` has returned the memory that was saved itself, so that it was written to where these differ.
        fault: called with an internal error.
    """

    def __init__(
        self,
        is_wanted: Callable[[], bool],
        see: Callable[[Pack, Unpack, Tensor, bool], None],
        fault: Callable[[Exception], None],
    ) -> None:
        self.is_wanted, self.see, self.fault = is_wanted, see, fault
        self._undo: Undo | None = None

    def begin(self) -> None:
        """Watch pairs that are set from now on."""
        self._undo = wrap_method(saved_tensors_hooks, "__enter__", self._enter)

    def end(self) -> None:
        """Watch no more: pairs that are set hand on."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    @uncompiled_itself
    def _enter(self, original: Callable[[Any], None], hooks: Any) -> None:
        pair = (hooks.pack_hook, hooks.unpack_hook)
        is_theirs = not any(_is_of_torch(each) for each in (type(hooks), *pair) if each is not saved_tensors_hooks)
        original(_WatchedPair(self, *pair) if is_theirs and not is_tracing() else hooks)


def _is_of_torch(given: Any) -> bool:
    module = str(getattr(given, "__module__", ""))
    return module.startswith("torch.") or isinstance(given, torch.fx.GraphModule)


class _WatchedPair:
    """A pair of the program's, in its place. It outlives the watch where the program keeps a graph."""

    def __init__(self, watch: PairWatch, pack: Pack, unpack: Unpack) -> None:
        self._watch = weakref.ref(watch)
        self._pack, self._unpack = pack, unpack

    @uncompiled
    def pack_hook(self, tensor: Tensor) -> Any:
        """Pack as the program does, and remember a sample of what is packed."""
        sample = self._sample(tensor)
        held = self._pack(tensor)
        if sample is None:
            return held
        is_itself = isinstance(held, Tensor) and _address(held) == _address(tensor)
        return Held(held, sample, tensor.shape, _address(tensor) if is_itself else 0)

    @uncompiled
    def unpack_hook(self, held: Any) -> Tensor:
        """Unpack as the program does, and compare."""
        if type(held) is not Held:
            return self._unpack(held)
        found = self._unpack(held.held)
        watch = self._watch()
        if watch is not None and isinstance(found, Tensor) and found.shape == held.shape:
            try:
                with without_functions(), plain_torch():
                    now = _take(found).to(held.sample)
                    sizes = torch.stack([(now - held.sample).norm(), held.sample.norm()])
                    watch.see(self._pack, self._unpack, sizes, _address(found) == held.memory != 0)
            except Exception as error:
                watch.fault(error)
        return found

    def _sample(self, tensor: Tensor) -> Tensor | None:
        watch = self._watch()
        if watch is None or not watch.is_wanted() or not _has_values(tensor):
            return None
        try:
            with without_functions(), plain_torch():
                return _take(tensor).to(torch.float32, copy=True)
        except Exception as error:
            watch.fault(error)
            return None


def _has_values(tensor: Tensor) -> bool:
    is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta
    return is_plain and tensor.is_floating_point() and tensor.numel() > 0 and not is_transformed(tensor)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if type(tensor) in _PLAIN and tensor.layout is torch.strided else 0


def _take(tensor: Tensor) -> Tensor:
    values = tensor.detach().reshape(-1)
    return values[:: -(-len(values) // MOST)]
