"""At which recorded steps sources may look at what is dear."""

from __future__ import annotations

EVERY = 128
"""Between looks, once a run has settled."""


def is_look(recorded: int) -> bool:
    """Whether the step before which so many were recorded is looked at: 0, 1, 2, powers of two, every 128th."""
    return recorded % EVERY == 0 or recorded & (recorded - 1) == 0
