"""JSON that somebody else may have written: whatever is wrong with it is a ``ValueError``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from retrograd.foreign.regular import expect_file

LARGEST = 1 << 28
"""Bytes of the largest text that is read: what is parsed takes ten times as much memory."""


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: it is not JSON, too large or too deep, or tells a thing twice.
    """
    if len(text) > LARGEST:
        raise ValueError(f"{len(text)} bytes of JSON are too many")
    try:
        return json.loads(text, object_pairs_hook=_join_pairs)
    except RecursionError:
        raise ValueError("its values lie too deep inside of each other") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else.
    """
    with expect_file(path).open("rb") as file:
        return expect_object(parse_json(file.read(LARGEST + 1)))


def parse_object(text: str | bytes) -> dict[str, Any]:
    """What a JSON text says, where that is an object.

    Raises:
        ValueError: it is none.
    """
    return expect_object(parse_json(text))


def expect_object(content: Any) -> dict[str, Any]:
    """The value itself, where it is a JSON object.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(content, dict):
        raise ValueError(f"a JSON object was expected, not {type(content).__name__}")  # noqa: TRY004  # what a bad JSON file raises too
    return content


def _join_pairs(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for key, value in pairs:
        if key in joined:
            raise ValueError(f"{key[:60]!r} is told twice")
        joined[key] = value
    return joined
