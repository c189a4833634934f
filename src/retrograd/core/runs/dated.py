"""Names of folders with the date and time in them, which are new ones each time. Loads within a moment."""

from __future__ import annotations

import time

from retrograd.core.addresses import is_remote, open_folder

DATE = "{date}"
"""What the name of a folder may hold for the date and time of its beginning."""


def make_dated(name: str, *, is_made: bool = True) -> str:
    """Name the folder that a name with ``{date}`` asks for: ``runs/a-20250131-120000``, or that with ``-2``.

    Args:
        name: any other name is returned as it is.
        is_made: make the folder, too, if it is on a disk: then nobody else who begins in the same second has it.
    """
    first = folder = name.replace(DATE, time.strftime("%Y%m%d-%H%M%S"))
    if first == name or is_remote(first):
        return first
    number = 1
    while not (_make(folder) if is_made else not open_folder(folder).exists()):
        number += 1
        folder = f"{first}-{number}"
    return folder


def _make(folder: str) -> bool:
    """Make a folder; return whether nobody else has it."""
    try:
        open_folder(folder).mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError:  # who writes there says why it cannot be
        return True
    return True
