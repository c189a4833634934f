"""The report: a run in, one HTML page out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from retrograd.core.errors import RunWriteError
from retrograd.core.guesses import names_arguments
from retrograd.core.history.history import History
from retrograd.core.history.sink import Phase
from retrograd.core.history.ungraded import list_ungraded
from retrograd.core.plugins import find_provided
from retrograd.core.runs.findings import explain_for_page
from retrograd.core.runs.layout import INVENTORY
from retrograd.core.runs.reader import Given, Run, read_history, read_run
from retrograd.core.views.page.frame import frame_page, write_page
from retrograd.core.views.report.blocks import (
    Blocks,
    make_exponent_block,
    make_statistic_blocks,
    pack_signed,
)
from retrograd.core.views.report.facts import (
    describe_data,
    describe_recorded,
    describe_run,
    list_modules,
    list_troubles,
)
from retrograd.core.views.report.findings import describe_card, describe_findings, find_first_nonfinite
from retrograd.core.views.report.pictures import pack_pictures
from retrograd.core.views.report.scalars import make_scalar_block
from retrograd.core.views.report.scope import choose_scope
from retrograd.core.views.shown import add_ungraded, describe_ungraded, group_places

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
