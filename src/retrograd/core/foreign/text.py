"""Text that somebody else may have written: JSON and the kinds of its values, files, and what a terminal is shown.

Whatever is wrong with JSON is a ``ValueError``.
"""

from __future__ import annotations

import json
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from retrograd.core.addresses import fetch, is_remote, reaching

LARGEST = 1 << 28
"""Bytes of the largest text that is read: what is parsed takes ten times as much memory."""


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: it is not JSON, too large or too deep, or has a key twice.
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
        RunUnreachableError: the store that it lies in cannot be asked.
        ValueError: it holds something else.
    """
    return expect_object(parse_json(read_limited(path)))


def read_limited(path: Path) -> bytes:
    """Read a file of text; of one that is too large to be parsed no more than tells so.

    Raises:
        OSError, RunUnreachableError: see :func:`read_json`.
    """
    if is_remote(path):
        with reaching(path):
            return fetch(path, 0, LARGEST + 1)
    with expect_file(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size  # as much memory is reserved as is asked for
        return file.read(min(size, LARGEST) + 1)


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON text that is an object.

    Raises:
        ValueError: it is not.
    """
    return expect_object(parse_json(text))


def expect_object(content: Any) -> dict[str, Any]:
    """Return a value that is a JSON object.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(content, dict):
        raise ValueError(f"a JSON object was expected, not {type(content).__name__}")  # noqa: TRY004  # what a bad JSON file raises too
    return content


def _join_pairs(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for key, value in pairs:
        if key in joined:
            raise ValueError(f"{key[:60]!r} is a duplicate key")
        joined[key] = value
    return joined


def expect_file(path: str | os.PathLike[str]) -> Path:
    """Return a path with a file. A device, or a pipe that nobody writes to, is not opened.

    Raises:
        FileNotFoundError: nothing is there.
        OSError: it is not a file.
    """
    if is_remote(path):
        return cast(Path, path)
    path = Path(path)
    if not path.is_file() and (path.exists() or path.is_symlink()):
        raise OSError(f"{str(path)!r} is not a file")
    return path


MOST = 1 << 64
"""No whole number that we write is as large."""


def check_kinds(content: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Check the values of an object that are there.

    Args:
        content: what was read.
        kinds: key → annotation of its value.

    Raises:
        ValueError: one is of another kind.
    """
    for key, hint in kinds.items():
        if key in content and not fits(content[key], hint):
            raise ValueError(f"{key!r} cannot be {_shorten(content[key])}")


def check_fields(instance: Any) -> None:
    """Check the fields of a dataclass that was made of what was read.

    Raises:
        ValueError: one is not what its annotation says.
    """
    kind: Any = type(instance)
    for name, hint in _hints_of(kind):
        if not fits(getattr(instance, name), hint):
            raise ValueError(f"{name!r} cannot be {_shorten(getattr(instance, name))}")


def to_plain(value: Any) -> Any:
    """Anything in the terms of JSON: a dataclass as its fields that are not as by default, what JSON lacks as text."""
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return value if value - value == 0 else str(value)
        case Mapping():
            return {str(name): to_plain(each) for name, each in value.items()}
        case list() | tuple():
            return [to_plain(each) for each in value]
        case _ if is_dataclass(value) and not isinstance(value, type):
            given = {each.name: getattr(value, each.name) for each in fields(value)}
            return {each.name: to_plain(given[each.name]) for each in fields(value) if given[each.name] != _usual(each)}
        case _:
            return str(value)


def _usual(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def from_plain(data: Any, hint: Any) -> Any:
    """Read the output of :func:`to_plain`, by the annotation of what it was made of.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it was made of something else.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        kind: Any = hint
        hints = dict(_hints_of(kind))
        made = kind(**{name: from_plain(each, hints[name]) for name, each in data.items()})
        check_fields(made)
        return made
    if data is not None and origin in {Union, types.UnionType}:
        return from_plain(data, next((each for each in inner if is_dataclass(each)), Any))
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{_shorten(data)} is not a list")  # as all that is wrong with JSON
        kinds = [inner[0]] * len(data) if inner[-1] is Ellipsis else inner
        return tuple(map(from_plain, data, kinds))
    if origin is Mapping:
        return {name: from_plain(each, inner[1]) for name, each in data.items()}
    return data


def fits(value: Any, hint: Any) -> bool:
    """Check a value against an annotation."""
    return _make_check(hint)(value)


@cache
def _make_check(hint: Any) -> Callable[[Any], bool]:
    """What checks values against an annotation; a file may have a million of them."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if origin in {Union, types.UnionType}:
        checks = [_make_check(each) for each in inner]
        return lambda value: any(check(value) for check in checks)
    if origin is Literal:
        return lambda value: value in inner
    if origin is tuple and inner[-1] is not Ellipsis:
        checks = [_make_check(each) for each in inner]
        return lambda value: isinstance(value, tuple) and len(value) == len(inner) and _all(checks, value)
    if origin in {list, Sequence, tuple}:
        kind, check = tuple if origin is tuple else Sequence, _make_check(inner[0])
        return lambda value: isinstance(value, kind) and not isinstance(value, str) and all(map(check, value))
    if origin in {dict, Mapping}:
        return partial(_is_mapping_of, _make_check(inner[1]))
    return partial(_is_a, hint)


def _all(checks: Sequence[Callable[[Any], bool]], values: Sequence[Any]) -> bool:
    return all(check(value) for check, value in zip(checks, values, strict=True))


def _is_mapping_of(check: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value) and all(map(check, value.values()))


def _is_a(kind: Any, value: Any) -> bool:
    if kind is None or kind is type(None):
        return value is None
    if kind is int:
        return type(value) is int and -MOST < value < MOST
    if kind is float:
        return type(value) is float or _is_a(int, value)
    return isinstance(value, kind)


@cache
def _hints_of(kind: Any) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def show_plainly(text: str, keep: str = "\n\t") -> str:
    """Write as escapes what would command a terminal, turn its direction, or cannot be encoded.

    Args:
        text: any text.
        keep: characters that are left as they are, though none can see them.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else ascii(letter)[1:-1] for letter in text)
