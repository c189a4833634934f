"""Parts that their writer has merged into larger files since a run was opened: where their rows are now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from retrograd.core.addresses import open_folder
from retrograd.core.foreign.text import read_json
from retrograd.core.runs.layout import RANK_FILE, Span, list_parts, parse_span


class Place(NamedTuple):
    """Where the rows of a part are.

    Attributes:
        path: of the file that holds them.
        start: the number of the first of them there.
    """

    path: Path
    start: int


@dataclass(frozen=True, slots=True)
class ListedParts:
    """What was known of the parts of a table of a rank when they were listed.

    Attributes:
        began: when its process began to write; None where that is not told.
        counts: rows of its parts, by their flushes.
    """

    began: float | None
    counts: dict[Span, int]

    def find(self, path: Path) -> Place | None:
        """Where the rows of a part are that is gone; None where no file holds them, or another process writes there.

        In a store the folder is listed anew.

        Raises:
            FileNotFoundError: the folder is gone.
        """
        folder, own = open_folder(path.parent), parse_span(path.name)
        found = [each for each in list_parts(folder) if each[0].contains(own)]
        if not found or not self._is_of(folder.parent):
            return None
        span, merged = found[-1]
        before = (count for each, count in self.counts.items() if span.contains(each) and each.last < own.first)
        return Place(merged, sum(before))

    def _is_of(self, folder: Path) -> bool:
        """Tell whether the same process writes this folder of a rank: another one may have written steps anew."""
        try:
            return bool(read_json(folder / RANK_FILE).get("began") == self.began)
        except (OSError, ValueError):
            return False
