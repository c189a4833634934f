"""Which folders are runs, and which run is the newest."""

from __future__ import annotations

import contextlib
from pathlib import Path

from retrograd.errors import NotARunError
from retrograd.runs.layout import MANIFEST, RANK_FILE, list_rank_folders

PARENT = Path("runs")
"""Where runs are recorded that were given no folder."""


def is_run(path: Path) -> bool:
    """Whether this is the folder of a run, or of one of its ranks."""
    return any((path / name).is_file() for name in (MANIFEST, RANK_FILE)) or bool(list_rank_folders(path))


def find_latest(parent: Path = PARENT) -> Path:
    """The run that was written to last.

    Raises:
        NotARunError: there is none.
    """
    written = {path: _last_written(path) for path in parent.glob("*") if is_run(path)}
    if not written:
        raise NotARunError(
            f"There is no run in {str(parent)!r}.", repair="name a run, or record one: `retrograd run train.py`."
        )
    return max(written, key=lambda path: (written[path], path.name))


def _last_written(run: Path) -> float:
    found = [0.0]
    for path in (run / MANIFEST, *(folder / RANK_FILE for folder in list_rank_folders(run))):
        with contextlib.suppress(OSError):
            found.append(path.stat().st_mtime)
    return max(found)
