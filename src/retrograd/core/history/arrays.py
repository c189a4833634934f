"""Arrow arrays from numpy arrays and lists of texts, and back, by their buffers.

``pa.array``, ``pa.scalar`` and ``to_numpy`` load pandas wherever it is installed, to find out whether they were given
something of its kind: half a second to two, which every recording would pay while its first steps run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_NONE = np.empty(0, np.int64)


def to_numbers(values: npt.NDArray[Any], kind: pa.DataType | None = None) -> pa.Array:
    """Numbers as an array of their own type or of another one; NaN stays what it is.

    Raises:
        pa.ArrowInvalid: a number does not fit that type.
    """
    is_mask = values.dtype == np.bool_  # of these Arrow keeps eight in a byte
    packed = np.packbits(values, bitorder="little") if is_mask else np.ascontiguousarray(values)
    own = pa.from_numpy_dtype(values.dtype)
    array = pa.Array.from_buffers(own, len(values), [None, pa.py_buffer(packed)])
    return array if kind is None else array.cast(kind)


def to_texts(texts: Sequence[str]) -> pa.StringArray:
    """Texts one after the other.

    Raises:
        UnicodeEncodeError: one of them is no Unicode.
        OverflowError: they are longer than two gigabytes.
    """
    encoded = [text.encode() for text in texts]
    ends = np.fromiter(itertools.accumulate(map(len, encoded), initial=0), np.int32)
    return pa.StringArray.from_buffers(len(encoded), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))


def to_coded_texts(texts: Sequence[str]) -> pa.DictionaryArray:
    """Texts of which most are the same, each held once."""
    code_of: dict[str, int] = {}
    codes = np.fromiter((code_of.setdefault(text, len(code_of)) for text in texts), np.int32, len(texts))
    return pa.DictionaryArray.from_arrays(to_numbers(codes), to_texts(list(code_of)))


def view_numbers(array: pa.Array) -> npt.NDArray[Any]:
    """Numbers where they lie; missing entries are NaN, in a copy."""
    if array.null_count:
        return np.asarray(array.to_numpy(zero_copy_only=False))
    kind = np.dtype(array.type.to_pandas_dtype())  # a numpy type, in spite of its name
    return np.frombuffer(array.buffers()[1], kind, len(array), array.offset * kind.itemsize) if len(array) else _NONE


def read_numbers(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """A column of plain numbers; missing entries are NaN."""
    pieces = [view_numbers(chunk) for chunk in column.chunks if len(chunk)]
    if not pieces:
        return np.empty(0, column.type.to_pandas_dtype())
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def read_codes(column: pa.ChunkedArray, code_of: dict[str, int]) -> npt.NDArray[np.int32]:
    """A dictionary column as codes of our own numbering; new names are added to ``code_of``."""
    pieces = [encode_texts(piece.dictionary, code_of)[view_numbers(piece.indices)] for piece in column.chunks]
    return np.concatenate([np.empty(0, np.int32), *pieces])


def encode_texts(texts: pa.Array, code_of: dict[str, int], rename: Callable[[str], str] = str) -> npt.NDArray[np.int32]:
    """The codes of some names; new ones are added to ``code_of``."""
    names = map(rename, texts.to_pylist())
    return np.array([code_of.setdefault(name, len(code_of)) for name in names], np.int32)


def give_back() -> None:
    """Return the memory to the system that Arrow holds for what it may read next."""
    pa.default_memory_pool().release_unused()
