"""Copies a run folder as far as it has been written, also one that is still being recorded.

No file of rows or tensors is written to once it has its name, so these are linked where the disk has links, and take
no room until the run itself removes them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from retrograd.core.errors import DamagedRunError
from retrograd.core.files import name_aside, write_json
from retrograd.core.foreign.text import read_json
from retrograd.core.runs.layout import (
    EVENTS,
    FINDINGS,
    INVENTORY,
    LOCK,
    MANIFEST,
    MERGED,
    PLACEMENTS,
    RANK_FILE,
    STATISTICS,
    TENSORS,
    list_parts,
    list_shards,
)
from retrograd.core.runs.lock import is_locked
from retrograd.core.runs.ranks import check_vacant

_ATTEMPTS = 20


def copy_run(run: Path, folders: Sequence[Path], target: Path) -> None:
    """Copy a run; the copy appears whole.

    Rows that are written meanwhile may be in it or not, each once. Rings and reports of hangs are left out.

    Args:
        run: its folder.
        folders: those of the ranks that are copied.
        target: a folder that is not there yet, or empty.

    Raises:
        RunExistsError: there are files in it.
        DamagedRunError: files of the run changed while they were read.
        OSError: it cannot be written.
    """
    check_vacant(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = name_aside(target)
    try:
        for folder in folders:
            _copy_rank(folder, aside / folder.name)
        for name in (FINDINGS, MANIFEST):  # behind the rows: it names all of their sites
            _copy_if_there(run / name, aside / name)
        aside.replace(target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _copy_rank(folder: Path, target: Path) -> None:
    for kind in (STATISTICS, MERGED, EVENTS, TENSORS):
        if (folder / kind).is_dir():
            _link_all(folder / kind, target / kind)
    for name in (INVENTORY, PLACEMENTS):  # behind the rows that they are about
        _copy_if_there(folder / name, target / name)
    if (folder / RANK_FILE).exists():
        facts = read_json(folder / RANK_FILE)
        write_json(target / RANK_FILE, {**facts, "copied": is_locked(folder / LOCK)})


def _link_all(folder: Path, target: Path) -> None:
    """Link all parts or shards of a folder, of which its writer may merge some into larger ones meanwhile."""
    for _ in range(_ATTEMPTS):
        target.mkdir(parents=True)
        try:
            for _, path in list_shards(folder) if folder.name == TENSORS else list_parts(folder):
                _link(path, target / path.name)
        except FileNotFoundError:
            shutil.rmtree(target)
            continue
        return
    raise DamagedRunError(f"Files of {str(folder)!r} changed while they were read.", repair="try again.")


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one without links
        shutil.copyfile(path, target)


def _copy_if_there(path: Path, target: Path) -> None:
    if path.exists():
        shutil.copyfile(path, target)
