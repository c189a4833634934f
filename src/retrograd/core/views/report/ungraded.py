"""What a page says of parameters that never got a gradient."""

from __future__ import annotations

from collections.abc import Mapping

from retrograd.core.history.history import History
from retrograd.core.history.ungraded import list_ungraded


def tell_ungraded(history: History, reasons: Mapping[str, str], *, is_running: bool) -> dict[str, str]:
    """For the name of each parameter that never got a gradient a few words, with the reason where there is one."""
    said = "no gradient so far" if is_running else "never got a gradient"
    return {name: f"{said}: {reasons[name]}" if name in reasons else said for name in list_ungraded(history)}
