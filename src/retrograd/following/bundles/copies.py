"""Copied tensors, and how to make tensors of them again that share memory as the originals did.

What an operation gives can depend on more than the values of its tensors: on their strides, on where in memory they
begin, and on whether two of them are views of the same. So a copy keeps all that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from retrograd.core.errors import CannotBundleError
from retrograd.core.hooks.dispatch import (
    is_zero_symbol,
    make_zero_symbol,
    memory_of,
    negated,
    set_version,
    sparse_parts,
    why_opaque,
)

_ALIGNMENT = 64
"""Torch's allocators begin at such addresses; some kernels choose their way by the address modulo this."""

_PLAIN = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip
"""Kinds of element that every reader of safetensors knows; the others are stored as bytes."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor in copied memory.

    Attributes:
        name: what it is called.
        shape, dtype, device, layout: as torch names them, without ``torch.``.
        block: which memory; None for a tensor without memory that is all zero, on the meta device, or sparse.
        strides, offset: where in that memory, in elements.
        conjugated, negated: whether it is read with the opposite sign of its imaginary part, or of all.
        parts: indices and values of a sparse tensor.
        coalesced: whether a sparse tensor says that no index comes twice.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    layout: str = "strided"
    block: str | None = None
    strides: tuple[int, ...] = ()
    offset: int = 0
    conjugated: bool = False
    negated: bool = False
    parts: tuple[StoredTensor, ...] = ()
    coalesced: bool = False


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """A piece of memory, of which a file of tensors holds a copy.

    Attributes:
        start: how many bytes of that memory before it were not copied.
        skew: its address modulo ``_ALIGNMENT``, less what is no multiple of the largest element in it.
        device: where it lay.
    """

    start: int = 0
    skew: int = 0
    device: str = "cpu"


Stored = Iterable[StoredTensor | None]


def rebuild(
    stored: Stored, blocks: Mapping[str, MemoryBlock], entries: Mapping[str, Tensor]
) -> tuple[Tensor | None, ...]:
    """Make tensors of their copies, in fresh memory.

    Args:
        stored: how they lie in memory; None for what is not a tensor.
        blocks: the memory, by name.
        entries: the contents of the blocks, by the same names.

    Raises:
        RuntimeError: this machine has no such device.
    """

    @cache
    def lay_out(name: str) -> tuple[Tensor, int]:
        """A copy of a block at an address like the original's, and where in it the uncopied beginning would be."""
        block, data = blocks[name], _bytes_in(entries[name])
        buffer = torch.zeros(block.skew + data.numel(), dtype=torch.uint8, device=block.device)
        buffer[block.skew :].copy_(data)
        return buffer, block.skew - block.start

    return tuple(None if each is None else _build(each, lay_out) for each in stored)


def _build(stored: StoredTensor, lay_out: Callable[[str], tuple[Tensor, int]]) -> Tensor:
    dtype, layout = constant(stored.dtype), constant(stored.layout)
    if stored.parts:
        parts = [_build(part, lay_out) for part in stored.parts]
        if layout is torch.sparse_coo:
            indices, values = parts
            return torch.sparse_coo_tensor(
                indices, values, stored.shape, is_coalesced=stored.coalesced, check_invariants=False
            )
        outer, inner, values = parts
        return torch.sparse_compressed_tensor(outer, inner, values, stored.shape, layout=layout, check_invariants=False)
    if stored.block is None:
        if stored.device == "meta":
            return torch.empty_strided(stored.shape, stored.strides, dtype=dtype, device=stored.device)
        return make_zero_symbol(stored.shape, dtype, stored.device)
    buffer, start = lay_out(stored.block)
    offset = stored.offset + start // dtype.itemsize if 0 not in stored.shape else 0
    empty = torch.empty(0, dtype=dtype, device=buffer.device)
    tensor = empty.set_(buffer.untyped_storage(), offset, stored.shape, stored.strides)
    tensor = tensor.conj() if stored.conjugated else tensor
    return negated(tensor) if stored.negated else tensor


def check_copies(stored: Stored, blocks: Mapping[str, MemoryBlock], entries: Mapping[str, Tensor]) -> None:
    """Check that tensors fit the memory that is there.

    Raises:
        ValueError, KeyError: one does not.
    """
    for each in stored:
        if each is None:
            continue
        if len(each.parts) != {"strided": 0, "sparse_coo": 2}.get(each.layout, 3):
            raise ValueError(f"a tensor of layout {each.layout!r} is not made of {len(each.parts)} others")
        check_copies(each.parts, blocks, entries)
        itemsize = constant(each.dtype).itemsize
        if min((*each.shape, *each.strides, each.offset), default=0) < 0:
            raise ValueError(f"shape {each.shape} and strides {each.strides} are not those of a tensor")
        if each.block is None or 0 in each.shape:
            continue
        block, there = blocks[each.block], entries[each.block].nbytes
        last = sum((length - 1) * stride for length, stride in zip(each.shape, each.strides, strict=True))
        first, end = each.offset * itemsize - block.start, (each.offset + last + 1) * itemsize - block.start
        if not 0 <= block.skew < _ALIGNMENT or block.start % _ALIGNMENT or not 0 <= first < end <= there:
            raise ValueError(f"a tensor of shape {each.shape} does not fit into {there} bytes")


@cache
def _constants() -> dict[str, Any]:
    found = [
        each for each in vars(torch).values() if isinstance(each, torch.dtype | torch.layout | torch.memory_format)
    ]
    return {print_constant(each): each for each in found}


def constant(name: str) -> Any:
    """The dtype, layout or memory format of this name.

    Raises:
        KeyError: this version of torch has none.
    """
    return _constants()[name]


def print_constant(value: object) -> str:
    """The name of a dtype, layout or memory format, without ``torch.``."""
    return str(value).removeprefix("torch.")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare two tensors bit for bit: NaN equals NaN, and 0.0 does not equal −0.0."""
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if one.layout is not torch.strided:
        return all(map(same_bits, sparse_parts(one), sparse_parts(other)))
    return one.is_meta or torch.equal(_own_bytes(one), _own_bytes(other))


def _own_bytes(tensor: Tensor) -> Tensor:
    if is_zero_symbol(tensor):
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    size = plain.element_size()
    return _memory(plain)[plain.storage_offset() * size :][: plain.numel() * size]


def _memory(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor is a view of; writing to it counts nowhere."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _bytes_in(entry: Tensor) -> Tensor:
    return entry.reshape(-1).view(torch.uint8)


# ---- copying ----


@dataclass(slots=True)
class _Original:
    """The memory that a block was copied from, kept alive by a tensor."""

    tensor: Tensor
    version: int | None
    is_written: bool = False


class MemoryCopier:
    """Copies of the memory of tensors.

    Attributes:
        blocks: what was copied, named after the first tensor in it.
        entries: its contents, as the tensor that fills it, or as bytes.
    """

    def __init__(self) -> None:
        self.blocks: dict[str, MemoryBlock] = {}
        self.entries: dict[str, Tensor] = {}
        self._originals: dict[str, _Original] = {}
        self._names: dict[int, str] = {}

    def store(self, tensor: Tensor, name: str) -> StoredTensor:
        """Copy what of a tensor's memory is not copied yet.

        Raises:
            CannotBundleError: the memory of this kind of tensor cannot be read.
        """
        refuse_opaque(tensor)
        common = name, tuple(tensor.shape), print_constant(tensor.dtype), str(tensor.device)
        if tensor.layout is not torch.strided:
            parts = tuple(self.store(part, f"{name}.part{place}") for place, part in enumerate(sparse_parts(tensor)))
            is_coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
            return StoredTensor(*common, layout=print_constant(tensor.layout), parts=parts, coalesced=is_coalesced)
        if tensor.is_meta:
            return StoredTensor(*common, strides=tuple(tensor.stride()))
        if is_zero_symbol(tensor):
            return StoredTensor(*common)
        return StoredTensor(
            *common,
            block=self._copy(tensor, *_span(tensor), name),
            strides=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()) if tensor.numel() else 0,
            conjugated=tensor.is_conj(),
            negated=tensor.is_neg(),
        )

    def holds(self, tensor: Tensor) -> bool:
        """Return whether some of the memory of a tensor is copied."""
        return tensor.layout is torch.strided and not tensor.is_meta and memory_of(tensor) in self._names

    def cover(self, tensor: Tensor) -> None:
        """Copy all of the memory that a tensor is a view of."""
        if self.holds(tensor):
            self._copy(tensor, 0, tensor.untyped_storage().nbytes())

    def will_write(self, tensor: Tensor) -> None:
        """Record that a tensor is about to be written to."""
        for part in (tensor,) if tensor.layout is torch.strided else sparse_parts(tensor):
            if self.holds(part):
                self._originals[self._names[memory_of(part)]].is_written = True

    def restore(self) -> None:
        """Put back what was in the memory that was written to, and how often that counted as written to."""
        for name, original in self._originals.items():
            if original.is_written:
                data = _bytes_in(self.entries[name])
                start = self.blocks[name].start
                _memory(original.tensor)[start : start + data.numel()].copy_(data)
                if original.version is not None:
                    set_version(original.tensor, original.version)

    def _copy(self, tensor: Tensor, start: int, end: int, name: str = "") -> str:
        """Copy these bytes of a tensor's memory, unless they are; returns the name of the block."""
        start -= start % _ALIGNMENT
        everything = _memory(tensor)
        if end > everything.numel():
            raise _refuse(tensor, "its memory has been given back, or was never there")
        name = self._names.setdefault(memory_of(tensor), name)
        block = self.blocks.get(name)
        if block is None:
            block = MemoryBlock(start, everything.data_ptr() % _ALIGNMENT, str(tensor.device))
            data = everything[start:end].to("cpu", copy=True)
            is_whole = tensor.is_contiguous() and start == 0 and tensor.storage_offset() == 0
            is_readable = is_whole and tensor.dtype in _PLAIN
            self.entries[name] = data.view(tensor.dtype).reshape(tensor.shape) if is_readable else data
            self._originals[name] = _Original(tensor, None if tensor.is_inference() else tensor._version)
        elif start < end:
            block = self._extend(name, everything, start, end)
        self.blocks[name] = replace(block, skew=block.skew - block.skew % tensor.element_size())
        return name

    def _extend(self, name: str, everything: Tensor, start: int, end: int) -> MemoryBlock:
        block, data = self.blocks[name], _bytes_in(self.entries[name])
        first, old_end = min(start, block.start), block.start + data.numel()
        if first == block.start and end <= old_end:
            return block
        before, after = everything[first : block.start], everything[old_end : max(end, old_end)]
        self.entries[name] = torch.cat([before.to("cpu"), data, after.to("cpu")])
        return replace(block, start=first)


class TensorCopies(MemoryCopier):
    """Copies of tensors as they are now.

    Args:
        tensors: what to copy.
        name: of all of them; their numbers are added to it.

    Attributes:
        tensors: how they lie in the copied memory.
    """

    def __init__(self, tensors: Iterable[Tensor | None], name: str) -> None:
        super().__init__()
        self.tensors = tuple(
            None if each is None else self.store(each.detach(), f"{name}.{place}") for place, each in enumerate(tensors)
        )

    def rebuild(self) -> tuple[Tensor | None, ...]:
        """Make tensors of their copies, in fresh memory."""
        return rebuild(self.tensors, self.blocks, self.entries)


def refuse_opaque(tensor: Tensor) -> None:
    """Check that the memory of a tensor can be read as it is.

    Raises:
        CannotBundleError: it cannot.
    """
    if reason := why_opaque(tensor):
        raise _refuse(tensor, reason)


def _refuse(tensor: Tensor, why: str) -> CannotBundleError:
    return CannotBundleError(
        f"A tensor of shape {tuple(tensor.shape)} cannot be written: {why}.",
        repair="bundle a node whose gradients and saved tensors are plain tensors, "
        "or run it again in this process with rg.rerun.",
    )


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte, and the one after the last, of a tensor in its memory."""
    if not tensor.numel():
        return 0, 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, size = int(tensor.storage_offset()), tensor.element_size()
    return first * size, (first + last + 1) * size
