"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from retrograd.core.addresses import is_address, is_remote, open_folder, put
from retrograd.core.errors import RunWriteError

UNFINISHED = ".tmp-"
"""Prefix of files that are being written; a reader passes over them, and a later writer removes them.

Their names have no other dot, and so no extension: a leading dot alone hides a file from few readers, and a glob of
finished files, such as ``*.parquet``, must not match.
"""

_ASIDE = re.compile(rf"{re.escape(UNFINISHED)}[0-9a-f]{{12}}-(?P<name>.+)", re.DOTALL)
_ABANDONED_SECONDS = 3600.0
"""What nobody has written to for so long was left by a process that was killed."""


def create(path: Path) -> BinaryIO:
    """A new file to write to, which is not there yet, not even as a link. Every file that we write is made here."""
    return path.open("xb")


def refuse_link(path: Path) -> Path:
    """Return a path inside of a run folder, which somebody else may have made, with links to anywhere in it.

    All folders that are written to, or removed from, are asked for so. That of a run may itself be a link, since the
    user has named it, and nothing below it.

    Raises:
        RunWriteError: it is a link.
    """
    if not is_remote(path) and path.is_symlink():
        raise RunWriteError(
            f"{str(path)!r} is a link.",
            repair="remove it, and put what it leads to in its place if that belongs to the run.",
            reason="nothing outside of the run folder is written or removed.",
        )
    return path


def name_aside(path: Path, folder: Path | None = None) -> Path:
    """Make the name of a file while it is written, which nobody else has, or can foresee.

    Args:
        path: what it will be called.
        folder: where it lies until then; where it will lie, when left out.
    """
    return (folder or path.parent) / f"{UNFINISHED}{secrets.token_hex(6)}-{_without_dots(path.name)}"


def _without_dots(name: str) -> str:
    return name.replace(".", "_")


@contextlib.contextmanager
def write_whole(path: Path, *, aside: Path | None = None) -> Iterator[BinaryIO]:
    """A file that is written under another name and renamed at the end, so that no reader sees half of it.

    It is not forced to the disk: it outlives a killed process, but not a power cut. A link of that name is replaced.
    In object storage it is held in memory until then, and put as one object.

    Args:
        path: of the file.
        aside: the folder, on the same disk, in which it lies until then: where all files of a folder are read as one
            table, nothing else may lie there. That of the file itself when left out.
    """
    if is_remote(path):
        held = io.BytesIO()
        yield held
        put(path, held.getvalue())
        return
    unfinished = name_aside(path, aside)
    try:
        with create(unfinished) as file:
            yield file
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def write_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Write a file that a user has chosen, whole: links are followed, and it keeps its permissions.

    A device or a pipe, such as ``/dev/stdout``, is written to as it is.
    """
    target = open_folder(path) if is_address(path) else Path(path)
    if is_remote(target):
        with write_whole(target) as file:
            yield file
        return
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    target = Path(os.path.realpath(target))
    remove_abandoned(target.parent, target.name)
    with write_whole(target) as file:
        yield file
        if target.exists():
            os.chmod(file.fileno(), target.stat().st_mode)  # noqa: PTH101  # it is open, and has another name yet


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text to a file that a user has chosen."""
    with write_file(path) as file:
        file.write(to_utf8(text))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file of ours; what JSON does not know is written as its text."""
    with write_whole(path) as file:
        file.write(to_utf8(json.dumps(content, indent=2, default=str, ensure_ascii=False)))


def to_utf8(text: str) -> bytes:
    r"""Text as bytes. Half of a surrogate pair, which UTF-8 has not, is written out, as in ``\udc80``."""
    return text.encode("utf-8", "backslashreplace")


def make_storable(text: str) -> str:
    """Text as every file can hold it: :func:`to_utf8`."""
    return text if text.isascii() else to_utf8(text).decode()


def make_all_storable(values: Iterable[Any]) -> list[Any]:
    """Make the texts among the values of a column storable."""
    return [make_storable(value) if isinstance(value, str) else value for value in values]


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Remove what a killed writer left half-written in a folder that is only ours.

    Args:
        folder: where.
        name: what it was to be called, or a glob; anything when left out.
    """
    for path in () if is_remote(folder) else folder.glob(f"{UNFINISHED}*{_without_dots(name)}"):
        with contextlib.suppress(IsADirectoryError, PermissionError):
            path.unlink(missing_ok=True)


def remove_abandoned(folder: Path, name: str | None = None) -> None:
    """Remove what killed writers left half-written long ago, in a folder that is not only ours.

    Args:
        folder: where.
        name: what it was to be called; any name, and folders alone, when left out.
    """
    with contextlib.suppress(OSError):
        for path in () if is_remote(folder) else list(folder.iterdir()):
            match = _ASIDE.fullmatch(path.name)
            is_meant = match and (name is None or _without_dots(match["name"]) == _without_dots(name))
            if is_meant and path.is_dir() is (name is None) and _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _is_abandoned(path: Path) -> bool:
    written: float = max(each.lstat().st_mtime for each in (path, *(path.iterdir() if path.is_dir() else ())))
    return time.time() - written > _ABANDONED_SECONDS


# ---- where a program has used up all files that it may have open ----

_SPARE = 8


class SpareFiles:
    """File descriptors that are kept until something has to be written, whatever the program has open by then."""

    def __init__(self) -> None:
        self._held: list[int] = []
        with contextlib.suppress(OSError):  # there are none left already
            while len(self._held) < _SPARE:
                self._held.append(os.open(os.devnull, os.O_RDONLY))

    def free(self) -> None:
        """Let go of them."""
        while self._held:
            os.close(self._held.pop())
