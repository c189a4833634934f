"""Tensors of every kind as tensors that safetensors can hold, bit for bit, and the way back."""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
})  # fmt: skip
"""What safetensors holds in every release that we support."""

INDICES = "#indices"
"""Suffix of the second entry of a sparse tensor."""


class UnstorableTensorError(TypeError):
    """A tensor of a kind that has no data to store, or none that we can read."""


def encode_tensor(name: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Copy a tensor to the CPU in a form that safetensors holds.

    Returns:
        Entries by name, and a note of what was done; empty for a tensor that is stored as it is. ``kind`` is
        ``complex`` (real and imaginary part as a last axis of two) or ``bytes`` (elements as uint8, for element
        types that safetensors lacks; ``dtype``, ``shape``); ``sparse`` is the shape of a sparse one, whose
        values are under its name and whose indices under ``name#indices``.

    Raises:
        UnstorableTensorError: for a quantized tensor, one without data, or a layout that we do not know.
    """
    if tensor.is_meta or tensor.is_quantized:
        raise UnstorableTensorError(f"a {'meta' if tensor.is_meta else 'quantized'} tensor is not stored")
    tensor = tensor.detach()
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)  # this thread has a stream of its own, on which nothing is waited for
    if tensor.layout is torch.sparse_coo:
        values, note = encode_tensor(name, tensor._values())
        indices = tensor._indices().to("cpu", copy=True).contiguous()
        return {**values, name + INDICES: indices}, {**note, "sparse": list(tensor.shape)}
    if tensor.layout is not torch.strided:
        raise UnstorableTensorError(f"the layout {tensor.layout} is not stored")
    data = tensor.to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()
    if data.is_complex():
        return {name: torch.view_as_real(data)}, {"kind": "complex"}
    if data.dtype in _PLAIN:
        return {name: data}, {}
    note = {"kind": "bytes", "dtype": str(data.dtype).removeprefix("torch."), "shape": list(data.shape)}
    return {name: data.reshape(-1).view(torch.uint8)}, note


def decode_tensor(entries: dict[str, torch.Tensor], name: str, note: dict[str, Any]) -> torch.Tensor:
    """The tensor that was encoded.

    Raises:
        ValueError, TypeError, RuntimeError: the note does not fit it.
    """
    data = entries[name]
    if note.get("kind") == "complex":
        data = torch.view_as_complex(data)
    elif note.get("kind") == "bytes":
        dtype = getattr(torch, note["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"there is no dtype {note['dtype']!r}")
        data = data.view(dtype).reshape(note["shape"])
    if "sparse" in note:
        data = torch.sparse_coo_tensor(entries[name + INDICES], data, note["sparse"], check_invariants=True)
    return data
