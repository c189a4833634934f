"""Anything that holds a record: a run, its folder, a history, or a recording."""

from __future__ import annotations

import os
from typing import Any, Protocol

from retrograd.errors import NothingRecordedError
from retrograd.history.history import History
from retrograd.runs.reader import Run, open_run


class Recorded(Protocol):
    """A recording, open or closed."""

    @property
    def history(self) -> History:
        """The history so far."""

    @property
    def run(self) -> Run | None:
        """The same as a run on disk; None in memory."""


Given = Run | History | Recorded | str | os.PathLike[str]


def find_run(given: Any) -> Run | History | None:
    """The run, or the history in memory, that is meant; None for what holds nothing that was recorded.

    Raises:
        NotARunError, DamagedRunError: the folder cannot be read.
    """
    if isinstance(given, str | os.PathLike):
        return open_run(given)
    for found in (given, getattr(given, "run", None), getattr(given, "history", None)):
        if isinstance(found, Run | History):
            return found
    return None


def read_run(given: Given) -> Run | History:
    """The same, or an error that says what to hand over.

    Raises:
        NothingRecordedError: it holds nothing that was recorded.
        NotARunError, DamagedRunError: the folder cannot be read.
    """
    found = find_run(given)
    if found is None:
        raise NothingRecordedError(
            f"{type(given).__name__} is not a run, a recording or a history.",
            repair="give the folder of a run, a recording of rg.record(model), or its history.",
        )
    return found


def read_history(given: Given) -> History:
    """The history of it.

    Raises:
        NothingRecordedError: it holds nothing that was recorded.
        NotARunError, DamagedRunError: the folder cannot be read.
    """
    found = read_run(given)
    return found.history if isinstance(found, Run) else found
