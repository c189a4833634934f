"""Copy tensors with the memory that they lie in, each piece once, as they turn up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from retrograd.bundles.copies import ALIGNMENT, Block, Copies, StoredTensor, bytes_of
from retrograd.errors import CannotBundleError
from retrograd.hooks.dispatch import is_zero_symbol, memory_of, set_version, sparse_parts, why_opaque


@dataclass(slots=True)
class _Original:
    """Where a block was copied from; the tensor keeps that memory alive."""

    tensor: Tensor
    version: int | None
    is_written: bool = False


class Memory:
    """Copies of the memory of tensors.

    Attributes:
        blocks: what was copied.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
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
        """Whether some of the memory of a tensor is copied."""
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
            self.blocks.append(Block(_to_cpu(everything[start:end]), start, skew, str(tensor.device), *form))
            version = None if tensor.is_inference() else tensor._version
            self._originals.append(_Original(tensor, version))
        elif start < end:
            _extend(self.blocks[number], everything, start, end)
        return number


def _extend(block: Block, everything: Tensor, start: int, end: int) -> None:
    first, old_end = min(start, block.start), block.start + block.data.numel()
    if first == block.start and end <= old_end:
        return
    before, after = everything[first : block.start], everything[old_end : max(end, old_end)]
    block.data = torch.cat([_to_cpu(before), block.data, _to_cpu(after)])
    block.start, block.dtype, block.shape = first, "uint8", (-1,)


def copy_tensors(tensors: Sequence[Tensor | None]) -> Copies:
    """Copy tensors as they are now.

    Raises:
        CannotBundleError: the memory of one of them cannot be read.
    """
    memory = Memory()
    stored = tuple(None if tensor is None else memory.store(tensor.detach()) for tensor in tensors)
    return Copies(tuple(memory.blocks), stored)


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
