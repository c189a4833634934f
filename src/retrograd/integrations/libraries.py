"""The libraries that this room is for: there, and new enough, or an error that says what to install. Loads none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from retrograd.errors import LibraryError


@contextmanager
def library_needed(name: str, oldest: str) -> Iterator[None]:
    """Import a library inside of this.

    Args:
        name: its name, as pip has it, and that of the extra of ours that installs it.
        oldest: the oldest version that will do.

    Raises:
        LibraryError: it is missing, too old, or cannot be imported.
    """
    repair = f"pip install 'retrograd[{name}]'"
    try:
        found = version(name)
    except PackageNotFoundError as error:
        raise LibraryError(f"{name} is not installed.", repair=repair) from error
    if _read(found) < _read(oldest):
        raise LibraryError(f"{name} {found} is installed, and {oldest} or newer is needed.", repair=f"{repair} -U")
    try:
        yield
    except ImportError as error:
        raise LibraryError(f"{name} {found} cannot be imported: {error}.", repair=repair) from error


def _read(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
