"""A safetensors file in object storage, of which only what is asked for is fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import safetensors.torch
import torch

from retrograd.core.addresses import fetch
from retrograd.core.foreign.text import check_kinds, parse_object

_FIRST_BYTES = 1 << 16
_LARGEST_HEADER = 100_000_000
"""Bytes; safetensors takes no larger one."""
_KINDS = {"dtype": str, "shape": list[int], "data_offsets": list[int]}


class RemoteShard:
    """The part of ``safetensors.safe_open`` that reading needs, by requests for ranges of bytes.

    Args:
        path: the object.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is no such file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        start = fetch(path, 0, _FIRST_BYTES)
        size = int.from_bytes(start[:8], "little")
        if len(start) < 8 or size > _LARGEST_HEADER:
            raise ValueError("it is not a safetensors file")
        self._data = 8 + size
        text = start[8 : self._data] if self._data <= len(start) else fetch(path, 8, self._data)
        self._entries = parse_object(text)
        self._metadata: dict[str, str] | None = self._entries.pop("__metadata__", None)
        for name, entry in self._entries.items():
            check_kinds({name: entry}, {name: dict[str, Any]})
            check_kinds(entry, _KINDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def keys(self) -> list[str]:
        """The names of its tensors."""
        return list(self._entries)

    def metadata(self) -> dict[str, str] | None:
        """What was written beside the tensors."""
        return self._metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        """Fetch one tensor.

        Raises:
            KeyError: there is none of that name.
            ValueError, SafetensorError: it is not where the file says, or of another size.
        """
        entry = self._entries[name]
        start, end = entry["data_offsets"]
        if not 0 <= start <= end:
            raise ValueError(f"{name!r} lies at {start} to {end}")
        data = fetch(self._path, self._data + start, self._data + end) if start < end else b""
        header = json.dumps({name: {**entry, "data_offsets": [0, end - start]}}).encode()
        found: dict[str, torch.Tensor] = safetensors.torch.load(len(header).to_bytes(8, "little") + header + data)
        return found[name]
