"""Paths in folders of others: a device, or a pipe that nobody writes to, is not opened."""

from __future__ import annotations

import os
from pathlib import Path


def expect_file(path: str | os.PathLike[str]) -> Path:
    """The path, where a file lies there.

    Raises:
        FileNotFoundError: nothing is there.
        OSError: something else is.
    """
    path = Path(path)
    if not path.is_file() and (path.exists() or path.is_symlink()):
        raise OSError(f"{str(path)!r} is not a file")
    return path
