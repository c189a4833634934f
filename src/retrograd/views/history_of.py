"""From what a user hands to a view to the history, the sites and the phase that it shows."""

from __future__ import annotations

from collections.abc import Iterable

from retrograd.history.history import History
from retrograd.history.sink import PHASES, Phase
from retrograd.runs.reader import Run


def history_of(run: Run | History) -> History:
    """The history of a run, or the history itself."""
    return run.history if isinstance(run, Run) else run


def choose_sites(history: History, patterns: Iterable[str] | None) -> list[str]:
    """Sites that the patterns select, in call order; all for None.

    Raises:
        NoSuchSiteError: for a pattern that matches nothing.
    """
    return history.sites if patterns is None else history.select(list(patterns))


def find_phase(history: History) -> Phase:
    """The first kind of forward of which there is anything: ``train`` where there was training."""
    return next((phase for phase in PHASES if len(history.matrix("count", phase=phase).steps)), PHASES[0])
