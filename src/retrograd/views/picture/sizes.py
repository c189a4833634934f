"""How much a tensor is, and numbers short enough for a box."""

from __future__ import annotations

import math
import re

from retrograd.graph.node import TensorInfo

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BITS = re.compile(r"[a-z]+(\d+)")


def elements_of(info: TensorInfo | None) -> int:
    """Elements of a tensor; 0 where nothing is known of it."""
    return 0 if info is None else math.prod(info.shape)


def bytes_of(info: TensorInfo | None) -> int:
    """Bytes of a tensor's elements, by the digits in the name of its type; one byte where there are none (bool)."""
    if info is None:
        return 0
    bits = _BITS.match(info.dtype)
    return math.prod(info.shape) * (int(bits[1]) // 8 if bits else 1)


def print_amount(count: int) -> str:
    """``999``, ``12.3k``, ``7.09M``, ``1.2B``."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if count >= unit:
            scaled = count / (1e3 if name == "k" else unit)
            return f"{scaled:.3g}{name}" if scaled < 999.5 else f"{scaled:,.0f}{name}"
    return f"{count:,}"


def print_bytes(count: int) -> str:
    """``12 B``, ``3.4 kB``, ``5.67 MB``."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def print_shape(info: TensorInfo | None, usual: str = "") -> str:
    """``[8, 512]``, with the type where it is not the usual one; ``scalar`` for a tensor without dimensions."""
    if info is None:
        return ""
    shape = f"[{', '.join(map(str, info.shape))}]" if info.shape else "scalar"
    return shape if info.dtype == usual else f"{info.dtype} {shape}" if not info.shape else f"{info.dtype}{shape}"


def clean(text: str) -> str:
    """Without characters that XML does not have."""
    return _NOT_XML.sub("\ufffd", text)
