"""Stand-ins for saved tensors in the graph: the tensor itself, or a view of memory that a policy has packed."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from retrograd.errors import SavedPolicyError
from retrograd.hooks.saved import base_of, set_bits, version_of, view_storage
from retrograd.policies.overwriting import SaveSite, refuse_overwritten
from retrograd.policies.policy import Packed, Saved


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
        """Whether this is the memory of that tensor, by more than its address, and what is in it now.

        Tensors that share memory need not share the counter of writes (``unsafe_chunk`` in an LSTM, ``.data``); those
        that are views of one tensor do.
        """
        return self._source() is storage and self._root() is _root_of(tensor) and self.version == version_of(tensor)

    def add_view(self) -> None:
        """One more saved tensor lies in the memory."""
        self._views += 1

    def memory(self) -> tuple[torch.UntypedStorage, int]:
        """A storage with the values, and where what was element 0 of the first one lies in it.

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
