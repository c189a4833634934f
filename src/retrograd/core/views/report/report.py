"""The report: a run in, one HTML page out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retrograd.core.errors import RunError, RunWriteError
from retrograd.core.guesses import names_arguments
from retrograd.core.history.history import History
from retrograd.core.history.kept import Kept
from retrograd.core.history.sink import Phase
from retrograd.core.history.ungraded import list_ungraded
from retrograd.core.plugins import find_provided
from retrograd.core.runs.findings import explain_for_page
from retrograd.core.runs.layout import INVENTORY
from retrograd.core.runs.reader import Given, Run, read_history, read_run
from retrograd.core.views.page.frame import frame_page, pack_json, write_page
from retrograd.core.views.report.blocks import Blocks, make_exponent_block, make_statistic_blocks, pack_signed
from retrograd.core.views.report.facts import (
    describe_data,
    describe_recorded,
    describe_run,
    list_modules,
    list_troubles,
)
from retrograd.core.views.report.findings import describe_card, describe_findings, find_first_nonfinite
from retrograd.core.views.report.scalars import make_scalar_block
from retrograd.core.views.report.scope import Scope, choose_scope
from retrograd.core.views.shown import add_ungraded, describe_ungraded, group_places

if TYPE_CHECKING:
    import torch

FILE_NAME = "report.html"


@names_arguments
def write_report(
    run: Given,
    path: str | os.PathLike[str] | None = None,
    *,
    phase: Phase | None = None,
    columns: int = 1000,
    megabytes: float = 8.0,
    inventory: Any = None,
) -> Path:
    """Write one HTML file that shows a run, opens offline and can be mailed.

    Args:
        run: a run, its folder, a recording, or a history.
        path: the file; ``report.html`` in the run folder, or here for a history, when left out.
        phase: which kind of forward to show; the first of ``train``, ``forward``, ``eval`` … that was recorded,
            when left out.
        columns: the most columns in which steps are drawn. A column keeps the extremes of its steps.
        megabytes: about how large the file may get; digits, then columns are given up for it.
        inventory: an ``rg.Inventory`` of saved tensors to show; by default the inventory that
            ``retrograd run --inventory`` has written into the folder of the first rank that has one.

    Returns:
        The path of the file.

    Raises:
        NothingRecordedError: ``run`` is not a record.
        NotARunError, DamagedRunError: a folder cannot be read.
        RunWriteError: if the file cannot be written.
        SavedTensorError: if the inventory in the run folder is damaged.
    """
    found = read_run(run)
    page = build_page(found, phase=phase, columns=columns, megabytes=megabytes, inventory=inventory)
    if path is not None:
        return write_page(path, page, "The report", RunWriteError)
    home = found.path if isinstance(found, Run) else Path()
    return write_page(home / FILE_NAME, page, "The report", RunWriteError, follow_links=not isinstance(found, Run))


def build_page(
    run: Run | History,
    *,
    phase: Phase | None = None,
    columns: int = 1000,
    megabytes: float = 8.0,
    inventory: Any = None,
) -> str:
    """Build the page as text; arguments are those of :func:`write_report`."""
    if inventory is None and isinstance(run, Run):  # of the first rank that has one
        inventory = next((path for rank in run.ranks if (path := rank.folder / INVENTORY).exists()), None)
    history = read_history(run)
    scope = choose_scope(history, phase, columns, megabytes)
    blocks = Blocks(make_statistic_blocks(scope), make_scalar_block(scope), make_exponent_block(scope))
    status = run.status if isinstance(run, Run) else history.manifest.get("status")
    findings, reasons, card = explain_for_page(run, list_ungraded(history))
    ungraded = describe_ungraded(history, reasons, is_running=status == "running")
    events, places = history.few_events, add_ungraded(group_places(scope.sites), ungraded, history.manifest)
    ranks, damaged = (run.ranks, run.damaged) if isinstance(run, Run) else ([], [])
    facts: dict[str, Any] = {
        **describe_run(run, scope),
        **describe_data(scope, places, blocks),
        "card": describe_card(card),
        "findings": describe_findings(findings, scope, places),
        "nonfinite": find_first_nonfinite(scope, places),
        "recorded": describe_recorded(scope, places),
        "troubles": list_troubles(history.manifest, events, ranks, scope.unseen, places, damaged),
        "model": list_modules(history.manifest.get("model")),
        "inventory": None,
        "live": None,
    }
    packed = {block.name: block.text for block in blocks.listed}
    extra = {"signed": pack_signed(scope), "pictures": pack_pictures(scope)}
    packed |= {name: text for name, text in extra.items() if text is not None}
    make_block = None if inventory is None else find_provided("inventory_block")  # with torch, which takes seconds
    if make_block is not None:
        facts["inventory"], packed["inventory"] = make_block(inventory)
    return frame_report(facts, packed)


def frame_report(facts: dict[str, Any], packed: dict[str, str], *, is_served: bool = False) -> str:
    """The page of these facts and blocks; one that is served may ask its server for more."""
    return frame_page(
        "retrograd.core.views.report",
        facts["title"],
        facts,
        packed,
        is_served=is_served,
        styles=(),
        parts={"map": "retrograd.core.views.report", "kept": "retrograd.core.views.kept"},
    )


# ---- pictures of kept tensors: the last few of each series, in as many cells as are drawn ----

_LAST, _MOST_BYTES = 4, 256 << 20
"""Tensors of a series, and bytes that are read for a page, beyond which later series have none."""

_ROWS, _COLUMNS = 32, 96
"""Cells of a picture, at most; a cell that holds several elements has the largest of them by magnitude."""

_LEVELS = 127
"""Shades of each sign; a cell is one of −127 … 127, or :data:`_BROKEN`."""

_BROKEN = 128


def pack_pictures(scope: Scope) -> str | None:
    """What is drawn of the tensors of each series that has any; None where none was kept."""
    series: dict[int, list[dict[str, Any]]] = {}
    room = _MOST_BYTES
    for number, site in enumerate(scope.sites):
        for each in list(scope.history[site].tensors)[-_LAST:]:
            if room > 0:
                told, size = describe_picture(each)
                series.setdefault(number, []).append(told)
                room -= size
    return pack_json(series) if series else None


def describe_picture(kept: Kept) -> tuple[dict[str, Any], int]:
    """A kept tensor: when, and its cells, row by row, without cells where it is lost; and how many bytes it has."""
    told: dict[str, Any] = {"step": kept.step, "micro": kept.micro, "call": kept.call, "phase": kept.phase}
    try:
        tensor = kept.tensor
    except RunError:
        return told | {"why": "its file cannot be read"}, 0
    if tensor is None:
        return told | {"why": "changed in place after it was kept"}, 0
    told["shape"] = list(tensor.shape)
    if tensor.numel() == 0:
        return told | {"why": "it has no elements"}, 0
    plane = _lay_flat(tensor)
    cells = _reduce(plane)
    is_finite = np.isfinite(cells)
    finite = np.where(is_finite, cells, 0.0)
    bound = float(np.abs(finite).max())
    shades = np.where(is_finite, np.rint(finite / (bound or 1.0) * _LEVELS), _BROKEN)
    return told | {
        "first": max(tensor.dim() - 2, 0),
        "bound": bound,
        "columns": cells.shape[1],
        "cells": shades.astype(int).ravel().tolist(),
    }, tensor.numel() * tensor.element_size()


def _lay_flat(tensor: torch.Tensor) -> npt.NDArray[np.float64]:
    """The last two dimensions, the first of all others; magnitudes of what is complex."""
    while tensor.dim() > 2:
        tensor = tensor[0]
    tensor = tensor.detach().cpu().to_dense()
    plane: npt.NDArray[np.float64] = (tensor.abs() if tensor.is_complex() else tensor).double().numpy()
    return plane.reshape(1, -1) if plane.ndim < 2 else plane


def _reduce(plane: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of each cell the element of the largest magnitude; not finite where any is not."""
    for axis, most in ((0, _ROWS), (1, _COLUMNS)):
        n = plane.shape[axis]
        if n > most:
            starts = (np.arange(most) * n) // most
            high = np.maximum.reduceat(plane, starts, axis=axis)
            low = np.minimum.reduceat(plane, starts, axis=axis)
            plane = np.where(np.abs(high) >= np.abs(low), high, low)
    return plane
