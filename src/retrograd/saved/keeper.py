"""The pair of hooks that carries out one policy: a saved tensor in, what stands for it in the graph out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from retrograd.amounts import show_bytes
from retrograd.hooks.engine import dispatch_modes
from retrograd.hooks.operation_tap import OperationTap, carry_out_unseen, hide_taps
from retrograd.hooks.parameter_storages import ParameterStorages
from retrograd.hooks.saved import (
    in_forward_mode,
    is_in_backward,
    is_jit_tracing,
    is_plain,
    not_of_the_program,
    remove_pair,
    untraced,
    version_of,
    view_storage,
    witness_version,
)
from retrograd.hooks.writes import program_line
from retrograd.notices import warn
from retrograd.policies.overwriting import FILLED_LATE, SaveSite
from retrograd.policies.policy import NEVER, Packed, Policy, Saved
from retrograd.saved.entry import HeldTensor, PackedEntry, PackedView

Key = tuple[int, torch.dtype, int, int]
"""Identity of a storage, dtype, and the elements of it that are kept."""


@dataclass(slots=True)
class Account:
    """Count what a policy was given so far, over all passes.

    Attributes:
        stretches: how many storage ranges it took over.
        saved_bytes: their size.
        resident_bytes: what the policy held in memory for them, in bytes.
        pack_seconds: time that the forward spent in its ``pack``.
        left_bytes: size of what it was offered and left in memory.
    """

    stretches: int = 0
    saved_bytes: int = 0
    resident_bytes: int = 0
    pack_seconds: float = 0.0
    left_bytes: int = 0


class Keeper:
    """Pack what is saved while this pair of hooks is the innermost.

    Args:
        policy: what becomes of it.
        parameters: memory that stays.
        find_site: says where this thread is in the model.
    """

    def __init__(self, policy: Policy, parameters: ParameterStorages, find_site: Callable[[], SaveSite]) -> None:
        self.policy = policy
        self.account = Account()
        self.is_open = False
        self.parameters = parameters
        self._find_site = find_site
        self._entries: WeakValueDictionary[Key, PackedEntry] = WeakValueDictionary()
        self._count = 0
        self._has_unpacked = False
        self._largest = 0  # of what was too small
        self._has_warned = policy.min_bytes >= NEVER
        self._taps: WeakSet[OperationTap] = WeakSet()

    def watch_operations(self) -> OperationTap | None:
        """Make the tap that shows the policy the operations of a thread, to be put on; None if it wants to see none."""
        if in_forward_mode() or is_jit_tracing():
            return None
        carry_out = self.policy.watch_operations(self.parameters.include)
        if carry_out is None:
            return None
        tap = OperationTap(carry_out)
        self._taps.add(tap)
        return tap

    def open(self) -> None:
        """Begin."""
        self.policy.open()
        self.is_open = True

    def close(self) -> None:
        """End; what is packed still comes back."""
        if self.is_open:
            self.is_open = False
            for tap in list(self._taps):  # one may be on in another thread
                tap.end()
            self.policy.close()

    @not_of_the_program
    def pack(self, tensor: Tensor) -> HeldTensor | PackedView:
        """Return what autograd is to hold for a tensor."""
        if not self.is_open:  # it was ended by another thread, which could not take the pair off
            remove_pair(self.pack)
        if is_jit_tracing():
            with untraced():
                return self.pack(tensor)
        taps = hide_taps() if dispatch_modes() else ()
        try:
            site = self._find_site()
            if site.log is not None:
                site = replace(site, line=program_line())
            elements = self._choose_elements(tensor)
            entry = None if elements is None else self._find_entry(tensor, elements, site)
            return HeldTensor(tensor, site) if entry is None else PackedView(tensor, entry)
        finally:
            for tap in taps:
                tap.put_on()

    def unpack(self, packed: HeldTensor | PackedView) -> Tensor:
        """Return the tensor again."""
        self._has_unpacked = True
        if not self._has_warned:
            self._warn_if_idle()
        if not dispatch_modes():
            return packed.unpack()
        taps = hide_taps()
        try:
            return carry_out_unseen(packed.unpack) if type(packed) is PackedView else packed.unpack()
        finally:
            if not is_in_backward():  # else the engine puts them on again, for the next node
                for tap in taps:
                    tap.put_on()

    def _choose_elements(self, tensor: Tensor) -> tuple[int, int] | None:
        """Choose the elements of a storage to offer to the policy for a tensor; None where it stays."""
        least = self.policy.min_bytes
        if not self.is_open or least >= NEVER or type(tensor) is Parameter or not is_plain(tensor):
            return None
        if not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        start, end = _elements_of(tensor, storage.nbytes())
        nbytes = (end - start) * tensor.itemsize
        is_small = nbytes < least
        if (is_small and (self._has_warned or nbytes <= self._largest)) or self.parameters.include(tensor, storage):
            return None
        if is_small:
            self._largest = nbytes
            return None
        return start, end

    def _find_entry(self, tensor: Tensor, elements: tuple[int, int], site: SaveSite) -> PackedEntry | None:
        """Find the entry of this memory, or offer it to the policy; None if it stays."""
        storage = tensor.untyped_storage()
        key = (id(storage), tensor.dtype, *elements)
        entry = self._entries.get(key)
        if entry is not None and entry.holds(tensor, storage):
            return entry
        if site.kind in FILLED_LATE:
            return None
        if self._has_unpacked:  # a backward pass lies between: what is saved now belongs to another forward
            self._count, self._has_unpacked = 0, False
        start, end = elements
        values = view_storage(storage, tensor, start, (end - start,), (1,))
        witness = witness_version(tensor)
        saved = Saved(values, tensor.shape, site.path, self._count, version_of(tensor), witness)
        self._count += 1
        packed = self._offer(saved)
        if packed is None:
            return None
        entry = self._entries[key] = PackedEntry(saved, tensor, witness, start, packed, site)
        return entry

    def _offer(self, saved: Saved) -> Packed | None:
        """Have the policy pack a storage range, and keep account of it."""
        account = self.account
        began = time.perf_counter()
        packed = self.policy.pack(saved)
        account.pack_seconds += time.perf_counter() - began
        if packed is None:
            account.left_bytes += saved.nbytes
        else:
            account.stretches += 1
            account.saved_bytes += saved.nbytes
            account.resident_bytes += packed.resident_bytes
        return packed

    def _warn_if_idle(self) -> None:
        """Warn once, when a backward pass has begun, if the policy has nothing to do."""
        self._has_warned = True
        if self.account.stretches or self.policy.has_failed:
            return
        if self.account.left_bytes:
            why = "it left all that it was offered in memory"
        elif self._largest:
            why = (
                f"the largest of what is saved has {show_bytes(self._largest)}, and what is smaller than"
                f" {show_bytes(self.policy.min_bytes)} (min_bytes) is left in memory"
            )
        else:
            why = "nothing was saved but what stays anyway, such as parameters"
        warn(f"{self.policy!r} has taken nothing: {why}.")


def _elements_of(tensor: Tensor, nbytes: int) -> tuple[int, int]:
    """The elements of a storage to keep for a tensor: all, or only its own where they are less than half.

    Tensors that share a storage (the parts of a fused projection) then share what is kept; but one batch of a data set
    in memory does not take the data set with it.
    """
    total = nbytes // tensor.itemsize
    if tensor.nbytes == nbytes:
        return 0, total
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (first, last + 1) if 2 * (last + 1 - first) < total else (0, total)
