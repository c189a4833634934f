"""JSON that somebody else may have written: whatever is wrong with it is a ``ValueError``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LARGEST = 1 << 28
"""Bytes of the largest text that is read: what is parsed takes ten times as much memory."""


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: it is no JSON, too large or too deep, or tells a thing twice.
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
    with path.open("rb") as file:
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


def check_kinds(content: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]]) -> None:
    """Check that values which are there have the kinds that readers expect.

    Args:
        content: an object that was read.
        kinds: key → what its value may be.

    Raises:
        ValueError: one is of another kind.
    """
    for key, kind in kinds.items():
        value = content.get(key)
        if key in content and (not isinstance(value, kind) or (isinstance(value, bool) and kind is int)):
            raise ValueError(f"{key!r} cannot be {_shorten(value)}")


def expect_texts(values: Any, what: str) -> list[str]:
    """The value itself, where it is a list of texts.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{what} is no list of texts")
    return values


def _join_pairs(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for key, value in pairs:
        if key in joined:
            raise ValueError(f"{_shorten(key)} is told twice")
        joined[key] = value
    return joined


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
