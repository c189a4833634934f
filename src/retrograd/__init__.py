"""retrograd: see, keep and rewrite what happens inside ``loss.backward()``.

The names below are all there is to rely on. One is loaded when it is first asked for: the command line, and processes
that never import torch, need none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retrograd.errors import RetrogradError as RetrogradError
    from retrograd.errors import RetrogradWarning as RetrogradWarning
    from retrograd.history.history import History as History
    from retrograd.recording.keep import Keep as Keep
    from retrograd.recording.plan import plan as plan
    from retrograd.recording.record import Recording as Recording
    from retrograd.recording.record import record as record
    from retrograd.recording.record import watch as watch
    from retrograd.recording.schedule import every as every
    from retrograd.recording.schedule import log_schedule as log_schedule
    from retrograd.recording.trigger import on_jump as on_jump
    from retrograd.recording.trigger import on_nonfinite as on_nonfinite
    from retrograd.runs.reader import Run as Run
    from retrograd.runs.reader import open_run as open_run
    from retrograd.statistics.custom import statistic as statistic
    from retrograd.views.report import write_report as write_report

__version__ = "0.1.0"

_HOMES = {
    "History": "history.history",
    "Keep": "recording.keep",
    "Recording": "recording.record",
    "RetrogradError": "errors",
    "RetrogradWarning": "errors",
    "Run": "runs.reader",
    "every": "recording.schedule",
    "log_schedule": "recording.schedule",
    "on_jump": "recording.trigger",
    "on_nonfinite": "recording.trigger",
    "open_run": "runs.reader",
    "plan": "recording.plan",
    "record": "recording.record",
    "statistic": "statistics.custom",
    "watch": "recording.record",
    "write_report": "views.report",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605  # one list, and a test holds it against a literal one


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'retrograd' has no attribute {name!r}")
    thing = getattr(import_module(f"retrograd.{_HOMES[name]}"), name)
    globals()[name] = thing
    return thing


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
