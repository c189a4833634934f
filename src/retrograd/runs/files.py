"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from retrograd.runs.layout import UNFINISHED


def create(path: Path) -> BinaryIO:
    """A new file to write to. Every byte that goes into a run folder passes through here."""
    return path.open("wb")


@contextlib.contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that is written under another name and renamed at the end, so that no reader sees half of it.

    It is not forced to the disk: it outlives a killed process, but not a power cut.
    """
    unfinished = path.with_name(UNFINISHED + path.name)
    try:
        with create(unfinished) as file:
            yield file
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file; what JSON does not know is written as its text."""
    with write_whole(path) as file:
        file.write(json.dumps(content, indent=2, default=str, ensure_ascii=False).encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file.

    Raises:
        ValueError: if it is no JSON object.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"a JSON object was expected, not {type(content).__name__}")  # noqa: TRY004  # what a bad JSON file raises too
    return content


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed writer left half-written."""
    for path in folder.glob(f"{UNFINISHED}*"):
        path.unlink(missing_ok=True)
