"""Copied tensors, and how to make tensors of them again that share memory as the originals did.

What an operation gives can depend on more than the values of its tensors: on their strides, on where in memory they
begin, and on whether two of them are views of the same. So a copy keeps all that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

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

ALIGNMENT = 64
"""Torch's allocators begin at such addresses; some kernels choose their way by the address modulo this."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor in copied memory.

    Attributes:
        shape, dtype, device, layout: as torch names them, without ``torch.``.
        block: which memory; None for a tensor without memory that is all zero, on the meta device, or sparse.
        strides, offset: where in that memory, in elements.
        conjugated, negated: whether it is read with the opposite sign of its imaginary part, or of all.
        parts: indices and values of a sparse tensor.
        coalesced: whether a sparse tensor says that no index comes twice.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    layout: str = "strided"
    block: int | None = None
    strides: tuple[int, ...] = ()
    offset: int = 0
    conjugated: bool = False
    negated: bool = False
    parts: tuple[StoredTensor, ...] = ()
    coalesced: bool = False


@dataclass(slots=True)
class MemoryBlock:
    """A copied piece of memory.

    Attributes:
        data: its bytes, on the CPU.
        start: how many bytes of that memory before them were not copied.
        skew: the address of the memory, modulo ``ALIGNMENT``.
        device: where it lay.
        dtype, shape: of the first tensor seen in it, if that fills it; else bytes.
    """

    data: Tensor
    start: int
    skew: int
    device: str
    dtype: str = "uint8"
    shape: tuple[int, ...] = (-1,)


@dataclass(frozen=True, slots=True)
class TensorCopies:
    """Copies of tensors, sharing memory as the tensors did.

    Attributes:
        blocks: the memory.
        tensors: how they lie in it; None for what is not a tensor.
    """

    blocks: tuple[MemoryBlock, ...]
    tensors: tuple[StoredTensor | None, ...]

    def rebuild(self) -> tuple[Tensor | None, ...]:
        """Make tensors of it, in fresh memory.

        Raises:
            RuntimeError: this machine has no such device.
        """
        sizes = [1] * len(self.blocks)
        for each in self.tensors:
            _find_sizes(each, sizes)
        buffers = [_lay_out(block, size) for block, size in zip(self.blocks, sizes, strict=True)]
        return tuple(None if each is None else _build(each, buffers) for each in self.tensors)

    def check(self) -> None:
        """Check that the tensors fit their memory.

        Raises:
            ValueError: one does not.
        """
        for block in self.blocks:
            if block.skew >= ALIGNMENT or block.start % ALIGNMENT:
                raise ValueError(f"memory cannot begin at {block.start}, {block.skew} after a border")
        for each in self.tensors:
            if each is not None:
                _check_stored(each, self.blocks)

    def stored_bytes(self) -> int:
        """Count the bytes that were copied."""
        return sum(block.data.numel() for block in self.blocks)

    def largest(self) -> int:
        """Bytes of the largest tensor when it is written out: one may show the same memory again and again."""
        return max(map(_written_out, self.tensors), default=0)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare two tensors bit for bit: NaN equals NaN, and 0.0 does not equal −0.0."""
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if one.layout is not torch.strided:
        return all(map(same_bits, sparse_parts(one), sparse_parts(other)))
    return one.is_meta or torch.equal(_own_bytes(one), _own_bytes(other))


def bytes_of(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor is a view of; writing to it counts nowhere."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _build(stored: StoredTensor, buffers: Sequence[tuple[Tensor, int]]) -> Tensor:
    dtype, layout = getattr(torch, stored.dtype), getattr(torch, stored.layout)
    if stored.parts:
        parts = [_build(part, buffers) for part in stored.parts]
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
    buffer, start = buffers[stored.block]
    offset = stored.offset + start // dtype.itemsize if 0 not in stored.shape else 0
    empty = torch.empty(0, dtype=dtype, device=buffer.device)
    tensor = empty.set_(buffer.untyped_storage(), offset, stored.shape, stored.strides)
    tensor = tensor.conj() if stored.conjugated else tensor
    return negated(tensor) if stored.negated else tensor


def _find_sizes(stored: StoredTensor | None, sizes: list[int]) -> None:
    """Note how large the largest element in each block is."""
    if stored is None:
        return
    for part in stored.parts:
        _find_sizes(part, sizes)
    if stored.block is not None:
        sizes[stored.block] = max(sizes[stored.block], getattr(torch, stored.dtype).itemsize)


def _lay_out(block: MemoryBlock, size: int) -> tuple[Tensor, int]:
    """A copy of a block at an address like the original's, and where in it the uncopied beginning would be.

    Args:
        block: what to copy.
        size: of its largest elements; they must begin at multiples of it.
    """
    start = block.skew - block.skew % size
    buffer = torch.zeros(start + block.data.numel(), dtype=torch.uint8, device=block.device)
    buffer[start : start + block.data.numel()].copy_(block.data)
    return buffer, start - block.start


def _written_out(stored: StoredTensor | None) -> int:
    if stored is None or stored.device == "meta":
        return 0
    if stored.parts:
        return max(map(_written_out, stored.parts))
    return int(prod(stored.shape)) * int(getattr(torch, stored.dtype).itemsize)


def _check_stored(stored: StoredTensor, blocks: Sequence[MemoryBlock]) -> None:
    dtype = getattr(torch, stored.dtype, None)
    if not isinstance(dtype, torch.dtype) or not isinstance(getattr(torch, stored.layout, None), torch.layout):
        raise ValueError(f"there is no {stored.dtype!r} or no {stored.layout!r} in torch")  # noqa: TRY004
    expected = {"strided": 0, "sparse_coo": 2}.get(stored.layout, 3)
    if len(stored.parts) != expected:
        raise ValueError(f"a tensor of layout {stored.layout!r} is made of {expected} others")
    for part in stored.parts:
        _check_stored(part, blocks)
    if min((*stored.shape, *stored.strides, stored.offset), default=0) < 0:
        raise ValueError(f"shape {stored.shape} and strides {stored.strides} are not those of a tensor")
    if stored.block is None:
        return
    if not 0 <= stored.block < len(blocks) or len(stored.shape) != len(stored.strides):
        raise ValueError(f"a tensor of shape {stored.shape} has no memory")
    block = blocks[stored.block]
    last = sum((length - 1) * stride for length, stride in zip(stored.shape, stored.strides, strict=True))
    first, size = stored.offset * dtype.itemsize - block.start, (last + 1) * dtype.itemsize
    if 0 not in stored.shape and (first < 0 or first + size > block.data.numel()):
        raise ValueError(f"a tensor of shape {stored.shape} does not fit into {block.data.numel()} bytes")


def _own_bytes(tensor: Tensor) -> Tensor:
    if is_zero_symbol(tensor):
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    size = plain.element_size()
    return bytes_of(plain)[plain.storage_offset() * size :][: plain.numel() * size]


# ---- memory ----


@dataclass(slots=True)
class _Original:
    """The memory that a block was copied from, kept alive by a tensor."""

    tensor: Tensor
    version: int | None
    is_written: bool = False


class MemoryCopier:
    """Copies of the memory of tensors.

    Attributes:
        blocks: what was copied.
    """

    def __init__(self) -> None:
        self.blocks: list[MemoryBlock] = []
        self._originals: list[_Original] = []
        self._found: dict[int, int] = {}

    def store(self, tensor: Tensor) -> StoredTensor:
        """Copy what of a tensor's memory is not copied yet.

        Raises:
            CannotBundleError: the memory of this kind of tensor cannot be read.
        """
        refuse_opaque(tensor)
        common = tuple(tensor.shape), _text(tensor.dtype), str(tensor.device)
        if tensor.layout is not torch.strided:
            parts = tuple(self.store(part) for part in sparse_parts(tensor))
            is_coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
            return StoredTensor(*common, layout=_text(tensor.layout), parts=parts, coalesced=is_coalesced)
        if tensor.is_meta:
            return StoredTensor(*common, strides=tuple(tensor.stride()))
        if is_zero_symbol(tensor):
            return StoredTensor(*common)
        block = self._copy(tensor, *_span(tensor))
        return StoredTensor(
            *common,
            block=block,
            strides=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()) if tensor.numel() else 0,
            conjugated=tensor.is_conj(),
            negated=tensor.is_neg(),
        )

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether some of the memory of a tensor is copied."""
        return tensor.layout is torch.strided and not tensor.is_meta and memory_of(tensor) in self._found

    def cover(self, tensor: Tensor) -> None:
        """Copy all of the memory that a tensor is a view of."""
        if self.holds(tensor):
            self._copy(tensor, 0, tensor.untyped_storage().nbytes())

    def will_write(self, tensor: Tensor) -> None:
        """Tell that a tensor is about to be written to."""
        for part in (tensor,) if tensor.layout is torch.strided else sparse_parts(tensor):
            if self.holds(part):
                self._originals[self._found[memory_of(part)]].is_written = True

    def restore(self) -> None:
        """Put back what was in the memory that was written to, and how often that counted as written to."""
        for block, original in zip(self.blocks, self._originals, strict=True):
            if original.is_written:
                end = block.start + block.data.numel()
                bytes_of(original.tensor)[block.start : end].copy_(block.data)
                if original.version is not None:
                    set_version(original.tensor, original.version)

    def _copy(self, tensor: Tensor, start: int, end: int) -> int:
        """Copy these bytes of a tensor's memory, unless they are; gives the number of the block."""
        start -= start % ALIGNMENT
        number = self._found.get(memory_of(tensor))
        everything = bytes_of(tensor)
        if end > everything.numel():
            raise _refuse(tensor, "its memory has been given back, or was never there")
        if number is None:
            number = self._found[memory_of(tensor)] = len(self.blocks)
            skew = everything.data_ptr() % ALIGNMENT
            fills = tensor.is_contiguous() and start == 0 and tensor.storage_offset() == 0
            form = (_text(tensor.dtype), tuple(tensor.shape)) if fills else ("uint8", (-1,))
            self.blocks.append(MemoryBlock(_to_cpu(everything[start:end]), start, skew, str(tensor.device), *form))
            version = None if tensor.is_inference() else tensor._version
            self._originals.append(_Original(tensor, version))
        elif start < end:
            _extend(self.blocks[number], everything, start, end)
        return number


def _extend(block: MemoryBlock, everything: Tensor, start: int, end: int) -> None:
    first, old_end = min(start, block.start), block.start + block.data.numel()
    if first == block.start and end <= old_end:
        return
    before, after = everything[first : block.start], everything[old_end : max(end, old_end)]
    block.data = torch.cat([_to_cpu(before), block.data, _to_cpu(after)])
    block.start, block.dtype, block.shape = first, "uint8", (-1,)


def copy_tensors(tensors: Sequence[Tensor | None]) -> TensorCopies:
    """Copy tensors as they are now.

    Raises:
        CannotBundleError: the memory of one of them cannot be read.
    """
    memory = MemoryCopier()
    stored = tuple(None if tensor is None else memory.store(tensor.detach()) for tensor in tensors)
    return TensorCopies(tuple(memory.blocks), stored)


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


def _to_cpu(data: Tensor) -> Tensor:
    return data.to("cpu", copy=True)


def _text(constant: object) -> str:
    return str(constant).removeprefix("torch.")
