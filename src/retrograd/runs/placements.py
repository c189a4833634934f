"""What each rank holds at its sites: written by its process, and read to merge ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrograd.errors import DamagedRunError
from retrograd.history.copies import Copies, join_groups
from retrograd.runs.files import read_json, write_json
from retrograd.runs.layout import PLACEMENTS

Facts = Mapping[str, Mapping[str, Any]]
"""By site: ``holds``, ``ranks``, and where they are known ``placements`` and ``stage``."""


def write_placements(folder: Path, facts: Facts) -> None:
    """Write the file of a rank; what a session before this one told of other sites stays.

    Raises:
        OSError: it cannot be written.
    """
    write_json(folder / PLACEMENTS, {**read_placements(folder), **facts})


def read_placements(folder: Path) -> dict[str, dict[str, Any]]:
    """The file of a rank; empty where there is none: one process alone, or a run of a version that did not know.

    Raises:
        DamagedRunError: it cannot be read.
    """
    path = folder / PLACEMENTS
    if not path.exists():
        return {}
    try:
        facts = read_json(path)
        checked = {str(site): {**fact, "ranks": [int(rank) for rank in fact["ranks"]]} for site, fact in facts.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedRunError(f"{str(path)!r} cannot be read: {error}.", repair="remove that file.") from error
    return checked


def find_copies(placements: Mapping[int, Facts], code_of: Mapping[str, int]) -> Copies | None:
    """Which ranks hold the same at which site; None where none do. Those of whom nothing is known hold their own.

    Args:
        placements: the facts of each rank, by the names that sites have in the history.
        code_of: the number of each site in the history.
    """
    listed: dict[int, list[list[int]]] = {}
    for facts in placements.values():
        for site, fact in facts.items():
            if len(fact["ranks"]) > 1 and fact["holds"] != "summand" and site in code_of:
                listed.setdefault(code_of[site], []).append(fact["ranks"])
    groups = {code: join_groups(found) for code, found in listed.items()}
    names = {code: name for name, code in code_of.items() if code in groups}
    return Copies(groups, names) if groups else None
