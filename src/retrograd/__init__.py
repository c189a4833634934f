"""retrograd: see, keep and rewrite what happens inside ``loss.backward()``.

The names below are all there is to rely on. One is loaded when it is first asked for: the command line, and processes
that never import torch, need none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retrograd.bundles.bundle import write_bundle as write_bundle
    from retrograd.bundles.replayed import replay as replay
    from retrograd.engine.one_node import rerun as rerun
    from retrograd.engine.replayer import run_from as run_from
    from retrograd.errors import RetrogradError as RetrogradError
    from retrograd.errors import RetrogradWarning as RetrogradWarning
    from retrograd.graph.graph import Graph as Graph
    from retrograd.graph.origins import record_origins as record_origins
    from retrograd.graph.walker import walk as walk
    from retrograd.hangs.watch import watch_hangs as watch_hangs
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
    from retrograd.stepping.stepper import step_through as step_through
    from retrograd.tracing.trace import Trace as Trace
    from retrograd.tracing.tracer import trace as trace
    from retrograd.views.chrome_trace import write_chrome_trace as write_chrome_trace
    from retrograd.views.graph_picture import draw_graph as draw_graph
    from retrograd.views.graph_text import print_graph as print_graph
    from retrograd.views.report import write_report as write_report
    from retrograd.views.trace_lines import LiveLines as LiveLines
    from retrograd.views.trace_table import print_trace as print_trace

__version__ = "0.1.0"

_HOMES = {
    "Graph": "graph.graph",
    "History": "history.history",
    "Keep": "recording.keep",
    "LiveLines": "views.trace_lines",
    "Recording": "recording.record",
    "RetrogradError": "errors",
    "RetrogradWarning": "errors",
    "Run": "runs.reader",
    "Trace": "tracing.trace",
    "draw_graph": "views.graph_picture",
    "every": "recording.schedule",
    "log_schedule": "recording.schedule",
    "on_jump": "recording.trigger",
    "on_nonfinite": "recording.trigger",
    "open_run": "runs.reader",
    "plan": "recording.plan",
    "print_graph": "views.graph_text",
    "print_trace": "views.trace_table",
    "record": "recording.record",
    "record_origins": "graph.origins",
    "replay": "bundles.replayed",
    "rerun": "engine.one_node",
    "run_from": "engine.replayer",
    "statistic": "statistics.custom",
    "step_through": "stepping.stepper",
    "trace": "tracing.tracer",
    "walk": "graph.walker",
    "watch": "recording.record",
    "watch_hangs": "hangs.watch",
    "write_bundle": "bundles.bundle",
    "write_chrome_trace": "views.chrome_trace",
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
