"""The pair of hooks that carries out one policy: a saved tensor in, what stands for it in the graph out.

A :class:`HeldTensor` is the tensor itself; a :class:`PackedView` lies in the memory of a :class:`PackedEntry`, a
storage range that the policy has packed.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from retrograd.core.amounts import show_bytes
from retrograd.core.errors import SavedPolicyError
from retrograd.core.hooks.dispatch import carry_out_unseen, hide_taps
from retrograd.core.hooks.engine import dispatch_modes, is_in_backward, is_jit_tracing
from retrograd.core.hooks.saved import (
    base_of,
    is_plain,
    not_of_the_program,
    remove_pair,
    set_bits,
    version_of,
    view_storage,
    witness_version,
)
from retrograd.core.hooks.storages import ParameterStorages
from retrograd.core.hooks.torch_calls import user_line
from retrograd.core.notices import warn
from retrograd.core.statistics.readable import untraced
from retrograd.memory.policies.overwriting import FILLED_LATE, SaveSite, refuse_overwritten
from retrograd.memory.policies.policy import NEVER, Packed, Policy, Saved


class HeldTensor:
    """A saved tensor that stays in memory. Autograd's own check for writes is done here."""

    __slots__ = ("site", "tensor", "version")

    def __init__(self, tensor: Tensor, site: SaveSite) -> None:
        # the tensor itself would make a cycle with a node that saves its own output; a leaf that is trained stays one
        self.tensor = tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()
        self.version = version_of(tensor)
        self.site = site

    def unpack(self) -> Tensor:
        """The tensor.

        Raises:
            OverwrittenError: it was written to since it was saved.
        """
        tensor = self.tensor
        if version_of(tensor) != self.version:
            versions = self.version, version_of(tensor)
            refuse_overwritten(tensor.size(), tensor.dtype, versions, self.site, id(tensor.untyped_storage()))
        return tensor


class PackedEntry:
    """A storage range at one version, shared by all saved tensors that lie in it.

    It is freed when autograd has let go of the last of them.

    Args:
        saved: the range.
        tensor: the tensor by which it was saved first.
        witness: counts writes with it.
        start: which element of its storage is its first.
        packed: what the policy made of it.
        site: where it was saved first.
    """

    __slots__ = (
        "__weakref__", "_brought_back", "_numel", "_packed", "_root", "_shift", "_source", "_uses", "_views", "_wanted",
        "site", "start", "storage", "version", "witness",
    )  # fmt: skip

    def __init__(
        self, saved: Saved, tensor: Tensor, witness: Tensor, start: int, packed: Packed, site: SaveSite
    ) -> None:
        values = saved.values
        storage = values.untyped_storage()
        self.site = site
        self.storage = id(storage)
        self.witness = witness
        self.version = saved.version
        self._root = weakref.ref(_root_of(tensor))
        self._packed = packed
        self._numel = values.numel()
        self.start = start
        self._source = weakref.ref(storage)
        self._brought_back: weakref.ref[torch.UntypedStorage] | None = None
        self._shift = 0
        self._views = 0
        self._uses = 0
        self._wanted: torch.UntypedStorage | None = None

    def holds(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        """Return whether it stands for the memory of a tensor, by more than the address, and for what is in it now.

        Tensors that share memory need not share the counter of writes (``unsafe_chunk`` in an LSTM, ``.data``); those
        that are views of one tensor do.
        """
        return self._source() is storage and self._root() is _root_of(tensor) and self.version == version_of(tensor)

    def add_view(self) -> None:
        """Count one more saved tensor that lies in the memory."""
        self._views += 1

    def memory(self) -> tuple[torch.UntypedStorage, int]:
        """Return a storage with the values, and where what was element 0 of the first one lies in it.

        It is the same for all tensors that lie in it, and is held until each of them has been asked for.
        """
        source = self._source()
        if source is not None:
            self._packed.notice()
            return source, self.start
        storage = None if self._brought_back is None else self._brought_back()
        if storage is None:
            values = self._checked(self._packed.restore())
            storage = values.untyped_storage()
            self._brought_back = weakref.ref(storage)
            self._shift = int(values.storage_offset())
        self._uses += 1
        self._wanted = storage if self._uses % self._views else None
        return storage, self._shift

    def _checked(self, values: Tensor) -> Tensor:
        expected = (torch.Size((self._numel,)), self.witness.dtype, self.witness.device)
        if (values.shape, values.dtype, values.device) != expected or not values.is_contiguous():
            raise SavedPolicyError(
                f"{type(self._packed).__name__}.restore() gave {list(values.shape)} of {values.dtype} on"
                f" {values.device} for {[self._numel]} of {expected[1]} on {expected[2]}, saved by"
                f" {self.site.path or 'no module'}.",
                repair="return the values with the shape, dtype and device of what `pack` was given.",
            )
        return values


class PackedView:
    """A saved tensor that lies in the memory of an entry."""

    __slots__ = ("_bits", "_entry", "_offset", "_size", "_stride")

    def __init__(self, tensor: Tensor, entry: PackedEntry) -> None:
        entry.add_view()
        self._entry = entry
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._offset = int(tensor.storage_offset()) - entry.start
        self._bits = tensor.is_conj(), tensor.is_neg()

    def unpack(self) -> Tensor:
        """The tensor as it was: its values, shape, strides, dtype and device.

        Raises:
            OverwrittenError: its memory was written to since it was saved.
            SavedPolicyError: the policy gave something else back.
        """
        entry = self._entry
        now = version_of(entry.witness)
        if now != entry.version:
            versions = entry.version, now
            refuse_overwritten(self._size, entry.witness.dtype, versions, entry.site, entry.storage)
        storage, base = entry.memory()
        tensor = view_storage(storage, entry.witness, base + self._offset, self._size, self._stride)
        conjugate, negative = self._bits
        return set_bits(tensor, is_conjugate=conjugate, is_negative=negative) if conjugate or negative else tensor


def _root_of(tensor: Tensor) -> Tensor:
    base = base_of(tensor)
    return tensor if base is None else base


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

    def open(self) -> None:
        """Begin."""
        self.policy.open()
        self.is_open = True

    def close(self) -> None:
        """End; what is packed still comes back."""
        if self.is_open:
            self.is_open = False
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
                site = replace(site, line=user_line())
            elements = self._choose_elements(tensor)
            entry = None if elements is None else self._find_entry(tensor, *elements, site)
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
        may_leave = self.is_open and least < NEVER and type(tensor) is not Parameter and is_plain(tensor)
        if not may_leave or not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        start, end = _elements_of(tensor, storage.nbytes())
        nbytes = (end - start) * tensor.itemsize
        if nbytes < least:
            if nbytes > self._largest and not self._has_warned and not self.parameters.include(tensor, storage):
                self._largest = nbytes
            return None
        return None if self.parameters.include(tensor, storage) else (start, end)

    def _find_entry(self, tensor: Tensor, start: int, end: int, site: SaveSite) -> PackedEntry | None:
        """Find the entry of these elements, or offer them to the policy; None if they stay."""
        storage = tensor.untyped_storage()
        key = (id(storage), tensor.dtype, start, end)
        entry = self._entries.get(key)
        if entry is None or not entry.holds(tensor, storage):
            entry = None if site.kind in FILLED_LATE else self._make_entry(tensor, start, end, site)
            if entry is not None:
                self._entries[key] = entry
        return entry

    def _make_entry(self, tensor: Tensor, start: int, end: int, site: SaveSite) -> PackedEntry | None:
        """Have the policy pack these elements, and keep account of it; None if they stay."""
        if self._has_unpacked:  # a backward pass lies between: what is saved now belongs to another forward
            self._count, self._has_unpacked = 0, False
        values = view_storage(tensor.untyped_storage(), tensor, start, (end - start,), (1,))
        witness = witness_version(tensor)
        saved = Saved(values, tensor.shape, site.path, self._count, version_of(tensor))
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
        return PackedEntry(saved, tensor, witness, start, packed, site)

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
    """Choose the elements of a storage to keep for a tensor: all, or only its own where they are less than half.

    Tensors that share a storage (the parts of a fused projection) then share what is kept; but one batch of a data set
    in memory does not take the data set with it.
    """
    total = nbytes // tensor.itemsize
    if tensor.nbytes == nbytes:
        return 0, total
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (first, last + 1) if 2 * (last + 1 - first) < total else (0, total)
