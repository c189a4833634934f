# ruff: noqa: INP001  # a folder of pages, not a package
"""Makes the JSON schema in the package from the classes: ``python docs/make_json_schema.py``."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import retrograd.explaining.launch
from retrograd.core.runs.findings import Evidence, Finding
from retrograd.explaining.card.card import CardEntry

SCHEMA = Path(retrograd.explaining.launch.__file__).with_name("explain.schema.json")

_NUMBER = {"type": ["number", "string"], "description": "text where it is not finite"}
_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: _NUMBER,
    types.NoneType: {"type": "null"},
}
_NAMES = {Finding: "finding", Evidence: "evidence", CardEntry: "entry"}


def describe_json() -> str:
    """The schema, as JSON."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What `retrograd explain --json` prints",
        "description": "With --card one card, else a finding on each line, the worst first; nothing where there is "
        "none. findings.jsonl of a run folder holds the same findings. More fields may be added.",
        "anyOf": [{"$ref": "#/$defs/finding"}, {"$ref": "#/$defs/card"}],
        "$defs": {
            **{name: _describe(kind) for kind, name in _NAMES.items()},
            "card": {
                "description": "What a run did.",
                "type": "object",
                "required": ["lines", "entries"],
                "properties": {
                    "lines": {"type": "array", "items": {"type": "string"}, "maxItems": 12},
                    "entries": {"type": "array", "items": {"$ref": "#/$defs/entry"}},
                },
            },
        },
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _describe(kind: type[Any]) -> dict[str, Any]:
    hints, told = typing.get_type_hints(kind), _read_attributes(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return {
        "description": (kind.__doc__ or "").partition("\n")[0],
        "type": "object",
        "required": names,
        "properties": {name: {**_write(hints[name]), "description": told[name]} for name in names},
    }


def _read_attributes(kind: type[Any]) -> dict[str, str]:
    """What the docstring says of each attribute."""
    text = " ".join((kind.__doc__ or "").partition("Attributes:")[2].split())
    parts = re.split(r"(?:^|(?<=[.;] ))(" + "|".join(field.name for field in dataclasses.fields(kind)) + r"): ", text)
    return {name: told.strip() for name, told in zip(parts[1::2], parts[2::2], strict=True)}


def _write(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _NAMES:
        return {"$ref": f"#/$defs/{_NAMES[hint]}"}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _write(arguments[0])}
    if origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return {"type": "object"}
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for each in arguments for kind in _list(_write(each)["type"])]
        return {"type": list(dict.fromkeys(kinds))}
    return {"type": _PLAIN[hint]["type"]}


def _list(kinds: str | list[str]) -> list[str]:
    return [kinds] if isinstance(kinds, str) else kinds


if __name__ == "__main__":
    SCHEMA.write_text(describe_json(), encoding="utf-8")
