"""One watch of the program, for all sources that need it."""

from __future__ import annotations

from retrograd.core.hooks.program_watch import ProgramWatch
from retrograd.core.recording.fact_source import FactHost


def watch_program(host: FactHost) -> ProgramWatch:
    """Make the watch of a recording, for ``host.share``; whoever begins or ends it does so for all."""
    return ProgramWatch(
        host.models.path_of, lambda error: host.fault("overwritten tensors and non-finite numbers", error)
    )
