"""From any tensor to plain strided elements that a slab can read, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C import _functorch

READ_AS_FLOAT32 = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)
READ_AS_INT64 = frozenset({torch.uint16, torch.uint32})
READABLE = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    }
)  # fmt: skip


class UnreadableTensorError(TypeError):
    """A tensor whose elements cannot be read, with the reason."""


def make_readable(tensor: Tensor, device: torch.device) -> Tensor:
    """Plain strided elements of a tensor, detached.

    A sparse tensor gives its explicit values (duplicates summed), a complex one its real and imaginary parts as
    separate elements, one that is spread over processes what this process holds. A subclass that computes as a plain
    tensor does is read as one.

    Args:
        tensor: any tensor.
        device: where it has to be.

    Raises:
        UnreadableTensorError: for a tensor without elements of its own (meta, fake, inside ``torch.func``), one
            whose subclass decides what its elements are, a quantized, nested, freed or remote one.
    """
    if _functorch.is_functorch_wrapped_tensor(tensor) or _functorch.is_legacy_batchedtensor(tensor):
        raise UnreadableTensorError("it is inside a torch.func transform, where it has no values of its own")
    tensor = _take_local(tensor)
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise UnreadableTensorError(f"{type(tensor).__name__} decides itself what its elements are")
    if tensor.device.type == "meta":
        raise UnreadableTensorError("a meta tensor has no elements")
    if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
        raise UnreadableTensorError(f"it is on {tensor.device}, and what reads it on {device}")
    if tensor.is_quantized or tensor.is_nested:
        raise UnreadableTensorError(f"a {'quantized' if tensor.is_quantized else 'nested'} tensor is not read")
    with torch._C.DisableTorchFunctionSubclass():
        return _read_as(_strided(tensor.detach()))


def _take_local(tensor: Tensor) -> Tensor:
    """Take what this process holds of a ``DTensor``, and what a collective brings that still runs."""
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            tensor = tensor.to_local()
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor = tensor.trigger_wait()  # type: ignore[attr-defined]
    return tensor


def _strided(tensor: Tensor) -> Tensor:
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return tensor.values()
    if tensor.layout is not torch.strided:
        return tensor.to_dense()
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    missing = (tensor.storage_offset() + _extent(tensor)) * tensor.element_size() > tensor.untyped_storage().nbytes()
    if tensor.numel() and (missing or tensor.data_ptr() == 0):
        raise UnreadableTensorError("there is no memory behind it")
    return tensor


def _extent(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _read_as(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).resolve_neg()
    tensor = tensor.resolve_neg()
    if tensor.dtype in READABLE:
        return tensor
    if tensor.dtype in READ_AS_FLOAT32:
        return tensor.float()
    if tensor.dtype in READ_AS_INT64:
        return tensor.to(torch.int64)
    raise UnreadableTensorError(f"elements of {tensor.dtype} are not read")


@contextmanager
def untraced() -> Iterator[None]:
    """A block in which ``torch.jit.trace`` notes nothing."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]
