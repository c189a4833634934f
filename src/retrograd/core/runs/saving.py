"""A record in memory, written as a run folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from retrograd.core.addresses import is_remote, open_folder
from retrograd.core.errors import RunError, RunWriteError
from retrograd.core.history.history import History
from retrograd.core.history.rows import Picked, StoredPart, order_by_site
from retrograd.core.history.sink import KeptTensor
from retrograd.core.runs.layout import MANIFEST
from retrograd.core.runs.manifest import Manifest
from retrograd.core.runs.queue import Unwritten
from retrograd.core.runs.rank_folder import RankFolder
from retrograd.core.runs.ranks import RankClaim

_NO_LIMIT = 1 << 62


def save_history(history: History, path: str | os.PathLike[str]) -> Path:
    """Write all that a history holds as a run folder: see :meth:`History.save`."""
    folder = open_folder(path)
    rows = history.rows
    if is_remote(folder) or any(isinstance(part, StoredPart) for part in rows.parts) or np.any(rows["rank"] != 0):
        raise RunWriteError(
            "Only a record that is held in memory, of one process, can be saved.",
            repair="copy the folder that it was read from; to write to a store, record there: rg.record(model, path).",
        )
    try:
        claim = RankClaim(folder)
        try:
            _write(history, folder, claim)
        finally:
            claim.release()
    except OSError as error:
        if isinstance(error, RunError):
            raise
        raise RunWriteError(
            f"The run folder {str(path)!r} cannot be written: {error}.",
            repair="give a folder on a disk that has room and may be written.",
        ) from error
    return folder


def _write(history: History, folder: Path, claim: RankClaim) -> None:
    rank = RankFolder(claim, step=None, tensor_budget=_NO_LIMIT, max_waiting=_NO_LIMIT, count_added=lambda: 0)
    names, rows = history.written_names, history.rows
    rank.names.add_rows(names)
    rank.write_columns(Picked(rows, order_by_site(rows["site"], rows["step"])))
    for name in names:
        kept = [(each, each.tensor) for each in history.list_tensors(name)]
        rank.copy_tensors(
            [KeptTensor(each.moment, name, tensor, tensor._version) for each, tensor in kept if tensor is not None]
        )
        rank.shards.write(is_paused=True)
    rank.write_events([*history.events, *rank.take_news()])
    manifest = Manifest(folder / MANIFEST)
    manifest.describe(dict(history.manifest))
    manifest.name_sites(rank.sites)
    status = str(history.manifest.get("status", "stopped"))
    rank.write_status(status, Unwritten())
    manifest.write()
