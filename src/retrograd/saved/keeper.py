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
from retrograd.policies.overwriting import FILLED_LATE, Place
from retrograd.policies.policy import NEVER, Policy, Saved
from retrograd.saved.entry import Entry, Held, View
from retrograd.saved.residents import Residents

Key = tuple[int, torch.dtype, int, int]


@dataclass(slots=True)
class Account:
    """What a policy was given so far, added up over all passes.

    Attributes:
        stretches: how many stretches of memory it took over.
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
    """Packs what is saved while it is innermost.

    Args:
        policy: what becomes of it.
        residents: what stays.
        find_place: says where this thread is in the model.
    """

    def __init__(self, policy: Policy, residents: Residents, find_place: Callable[[], Place]) -> None:
        self.policy = policy
        self.account = Account()
        self.is_open = False
        self.residents = residents
        self._find_place = find_place
        self._entries: WeakValueDictionary[Key, Entry] = WeakValueDictionary()
        self._count = 0
        self._has_unpacked = False
        self._largest = 0  # of what was too small
        self._has_told = policy.min_bytes >= NEVER
        self._taps: WeakSet[OperationTap] = WeakSet()

    def watch_operations(self) -> OperationTap | None:
        """What shows the policy what a thread carries out, to be put on; None if it wants to see nothing."""
        if in_forward_mode() or is_jit_tracing():
            return None
        carry_out = self.policy.watch_operations(self.residents.include)
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
    def pack(self, tensor: Tensor) -> Held | View:
        """What autograd is to hold for a tensor."""
        if not self.is_open:  # it was ended by another thread, which could not take the pair off
            remove_pair(self.pack)
        if is_jit_tracing():
            with untraced():
                return self.pack(tensor)
        if not dispatch_modes():
            return self._pack(tensor)
        taps = hide_taps()
        try:
            return self._pack(tensor)
        finally:
            for tap in taps:
                tap.put_on()

    def unpack(self, packed: Held | View) -> Tensor:
        """The tensor again."""
        self._has_unpacked = True
        if not self._has_told:
            self._tell()
        if not dispatch_modes():
            return packed.unpack()
        taps = hide_taps()
        try:
            return carry_out_unseen(packed.unpack) if type(packed) is View else packed.unpack()
        finally:
            if not is_in_backward():  # else the engine puts them on again, for the next node
                for tap in taps:
                    tap.put_on()

    def _pack(self, tensor: Tensor) -> Held | View:
        place = self._find_place()
        if place.log is not None:
            place = replace(place, line=program_line())
        least = self.policy.min_bytes
        if not self.is_open or least >= NEVER or type(tensor) is Parameter or not is_plain(tensor):
            return Held(tensor, place)
        storage = tensor.untyped_storage()
        total = storage.nbytes()
        if total < least or not tensor.numel() or self.residents.include(tensor, storage):
            if not self._has_told and self._largest < total < least and not self.residents.include(tensor, storage):
                self._largest = total
            return Held(tensor, place)
        start, end = _stretch(tensor, total)
        if (end - start) * tensor.itemsize < least:
            self._largest = max(self._largest, (end - start) * tensor.itemsize)
            return Held(tensor, place)
        key = (id(storage), tensor.dtype, start, end)
        entry = self._entries.get(key)
        if entry is None or not entry.holds(tensor, storage):
            entry = self._make_entry(tensor, storage, key, place)
        return Held(tensor, place) if entry is None else View(tensor, entry, start)

    def _tell(self) -> None:
        """A backward pass has begun: say once if the policy has nothing to do."""
        self._has_told = True
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

    def _make_entry(self, tensor: Tensor, storage: torch.UntypedStorage, key: Key, place: Place) -> Entry | None:
        """Offer a stretch to the policy; None if it stays."""
        if place.kind in FILLED_LATE:
            return None
        start, end = key[2:]
        if self._has_unpacked:  # a backward pass lies between: what is saved now belongs to another forward
            self._count, self._has_unpacked = 0, False
        values = view_storage(storage, tensor, start, (end - start,), (1,))
        witness = witness_version(tensor)
        saved = Saved(values, tensor.shape, place.path, self._count, version_of(tensor), witness)
        self._count += 1
        account = self.account
        began = time.perf_counter()
        packed = self.policy.pack(saved)
        account.pack_seconds += time.perf_counter() - began
        if packed is None:
            account.left_bytes += saved.nbytes
            return None
        account.stretches += 1
        account.saved_bytes += saved.nbytes
        account.resident_bytes += packed.resident_bytes
        entry = self._entries[key] = Entry(saved, tensor, witness, start, packed, place)
        return entry


def _stretch(tensor: Tensor, nbytes: int) -> tuple[int, int]:
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
