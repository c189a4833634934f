"""A recording in a notebook: what it has recorded so far, which is shown anew while it goes on."""

from __future__ import annotations

import threading
from importlib import import_module
from weakref import WeakKeyDictionary

from retrograd.core.history.history import History
from retrograd.core.notices import warn
from retrograd.core.recording.record import Recording
from retrograd.core.runs.lookout import Lookout
from retrograd.core.runs.reader import Run, open_run
from retrograd.core.views.followed import (
    CHANGES,
    RunGlance,
    describe_glance,
    describe_progress,
    glance_at,
    list_changes,
    list_lines,
)
from retrograd.core.views.notebook.page import NotebookPage
from retrograd.core.views.terminal import make_table

_DOING = "show a recording in the notebook"


class LiveCell:
    """What is shown of one recording, wherever it is displayed. It knows the record, not the recording.

    Args:
        record: what is recorded.
    """

    def __init__(self, record: Run | History) -> None:
        self._record = record
        self._handle = import_module("IPython.display").DisplayHandle()
        self._drawing = threading.Lock()
        self._seen: tuple[int, int, str] | None = None
        self._lookout: Lookout | None = None

    def display(self) -> None:
        """Show it in the running cell; where it was shown before it is brought up to date."""
        with self._drawing:
            self._refresh()
            self._handle.display(self._draw(), raw=True)

    def follow(self, recording: Recording) -> None:
        """Keep it up to date until the recording is closed."""
        if self._lookout is None:
            self._lookout = Lookout(self._look, _DOING)
            recording.call_when_closed(self._lookout.end)

    # ---- in a thread of its own, which must not set back what training has drawn ----

    def _look(self, is_last: bool) -> None:
        with self._drawing:
            if self._refresh() or is_last:
                self._handle.update(self._draw(), raw=True)

    def _refresh(self) -> bool:
        """Read on; returns whether there is anything new."""
        record = self._record
        if isinstance(record, Run):
            record.refresh()
        history = record.history if isinstance(record, Run) else record
        status = str(history.manifest.get("status"))
        before, self._seen = self._seen, (history.rows.count, history.all_events.count, status)
        return self._seen != before

    def _draw(self) -> dict[str, str]:
        glance = glance_at(self._record)
        return {"text/plain": describe_glance(glance), "text/html": draw_glance(glance, self._record)}


_cells: WeakKeyDictionary[Recording, LiveCell] = WeakKeyDictionary()


def show_recording(recording: Recording) -> None:
    """Show a recording in the running cell, and keep that up to date until it is closed.

    Raises:
        NotImplementedError: it could not be shown, which a warning says; IPython then shows what else there is.
    """
    try:
        cell = _cells.get(recording)
        if cell is None:
            cell = _cells[recording] = LiveCell(_find_record(recording))
        cell.display()
        if recording.is_open:
            cell.follow(recording)
    except Exception as error:
        warn(f"retrograd could not {_DOING}: {type(error).__name__}: {error}.")
        raise NotImplementedError from error


def draw_recording(recording: Recording) -> str:
    """A recording as it is now."""
    record = _find_record(recording)
    return draw_glance(glance_at(record), record)


def draw_glance(glance: RunGlance, record: Run | History) -> str:
    """How a record fares, its loss, what was found, and the sites that changed most."""
    page = NotebookPage()
    where = f"{record.path}: " if isinstance(record, Run) else ""
    page.console.print(f"{where}{describe_progress(glance)}", style="bold")
    for line in list_lines(glance):
        page.console.print(line)
    if glance.changed:
        page.console.print(make_table(page.console, CHANGES, list_changes(glance)))
    return page.as_html()


def _find_record(recording: Recording) -> Run | History:
    """The history in memory, or a run that nobody else refreshes."""
    if recording.path is None:
        return recording.history
    recording.flush()
    return open_run(recording.path)
