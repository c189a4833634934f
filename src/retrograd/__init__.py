"""retrograd: see, keep and rewrite what happens inside ``loss.backward()``.

The names below are all there is to rely on. One is loaded when it is first asked for: the command line, and processes
that never import torch, need none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from retrograd.randomness import random_kept as _random_kept

if TYPE_CHECKING:
    from retrograd import findings as findings
    from retrograd import rules as rules
    from retrograd import saved as saved
    from retrograd.adjoint.adjoint_check import AdjointCheck as AdjointCheck
    from retrograd.adjoint.check import check_adjoint as check_adjoint
    from retrograd.bundles.bundle import write_bundle as write_bundle
    from retrograd.bundles.replayed import replay as replay
    from retrograd.comparing.compare import compare as compare
    from retrograd.comparing.comparison import Comparison as Comparison
    from retrograd.engine.one_node import rerun as rerun
    from retrograd.engine.replayer import run_from as run_from
    from retrograd.errors import RetrogradError as RetrogradError
    from retrograd.errors import RetrogradWarning as RetrogradWarning
    from retrograd.features.dataset import extract_dataset as extract_dataset
    from retrograd.features.extractor import extract as extract
    from retrograd.features.stored import open_features as open_features
    from retrograd.findings.explain import explain as explain
    from retrograd.findings.finding import Finding as Finding
    from retrograd.findings.findings import Findings as Findings
    from retrograd.functions.auxiliary import Auxiliary as Auxiliary
    from retrograd.functions.function import Function as Function
    from retrograd.gradients.explain import explain_gradients as explain_gradients
    from retrograd.gradients.gradient_reasons import GradientReasons as GradientReasons
    from retrograd.graph.graph import Graph as Graph
    from retrograd.graph.origins import record_origins as record_origins
    from retrograd.graph.walker import walk as walk
    from retrograd.hangs.watch import watch_hangs as watch_hangs
    from retrograd.history.history import History as History
    from retrograd.inventory.inventory import Inventory as Inventory
    from retrograd.inventory.recorder import take_inventory as take_inventory
    from retrograd.kinks.find import find_kinks as find_kinks
    from retrograd.kinks.kinks import Kinks as Kinks
    from retrograd.recording.keep import Keep as Keep
    from retrograd.recording.plan import plan as plan
    from retrograd.recording.record import Recording as Recording
    from retrograd.recording.record import record as record
    from retrograd.recording.record import watch as watch
    from retrograd.recording.schedule import every as every
    from retrograd.recording.schedule import log_schedule as log_schedule
    from retrograd.recording.trigger import on_jump as on_jump
    from retrograd.recording.trigger import on_nonfinite as on_nonfinite
    from retrograd.rewriting.rewriting import Rewriting as Rewriting
    from retrograd.rewriting.rewriting import rewrite as rewrite
    from retrograd.rules.rehearsal import rehearse as rehearse
    from retrograd.runs.reader import Run as Run
    from retrograd.runs.reader import open_run as open_run
    from retrograd.saved.keeping import keep_saved as keep_saved
    from retrograd.statistics.custom import statistic as statistic
    from retrograd.stepping.stepper import step_through as step_through
    from retrograd.tracing.trace import Trace as Trace
    from retrograd.tracing.tracer import trace as trace
    from retrograd.views.chrome_trace import write_chrome_trace as write_chrome_trace
    from retrograd.views.graph_picture import draw_graph as draw_graph
    from retrograd.views.graph_text import print_graph as print_graph
    from retrograd.views.inventory_page import write_inventory as write_inventory
    from retrograd.views.inventory_table import print_inventory as print_inventory
    from retrograd.views.report import write_report as write_report
    from retrograd.views.trace_lines import LiveLines as LiveLines
    from retrograd.views.trace_table import print_trace as print_trace

__version__ = "0.1.0"

_HOMES = {
    "AdjointCheck": "adjoint.adjoint_check",
    "Auxiliary": "functions.auxiliary",
    "Comparison": "comparing.comparison",
    "Finding": "findings.finding",
    "Findings": "findings.findings",
    "Function": "functions.function",
    "GradientReasons": "gradients.gradient_reasons",
    "Graph": "graph.graph",
    "History": "history.history",
    "Inventory": "inventory.inventory",
    "Keep": "recording.keep",
    "Kinks": "kinks.kinks",
    "LiveLines": "views.trace_lines",
    "Recording": "recording.record",
    "RetrogradError": "errors",
    "RetrogradWarning": "errors",
    "Rewriting": "rewriting.rewriting",
    "Run": "runs.reader",
    "Trace": "tracing.trace",
    "check_adjoint": "adjoint.check",
    "compare": "comparing.compare",
    "draw_graph": "views.graph_picture",
    "every": "recording.schedule",
    "explain": "findings.explain",
    "explain_gradients": "gradients.explain",
    "extract": "features.extractor",
    "extract_dataset": "features.dataset",
    "find_kinks": "kinks.find",
    "keep_saved": "saved.keeping",
    "log_schedule": "recording.schedule",
    "on_jump": "recording.trigger",
    "on_nonfinite": "recording.trigger",
    "open_features": "features.stored",
    "open_run": "runs.reader",
    "plan": "recording.plan",
    "print_graph": "views.graph_text",
    "print_inventory": "views.inventory_table",
    "print_trace": "views.trace_table",
    "record": "recording.record",
    "record_origins": "graph.origins",
    "rehearse": "rules.rehearsal",
    "replay": "bundles.replayed",
    "rerun": "engine.one_node",
    "rewrite": "rewriting.rewriting",
    "run_from": "engine.replayer",
    "statistic": "statistics.custom",
    "step_through": "stepping.stepper",
    "take_inventory": "inventory.recorder",
    "trace": "tracing.tracer",
    "walk": "graph.walker",
    "watch": "recording.record",
    "watch_hangs": "hangs.watch",
    "write_bundle": "bundles.bundle",
    "write_chrome_trace": "views.chrome_trace",
    "write_inventory": "views.inventory_page",
    "write_report": "views.report",
}

_ROOMS = {"findings", "rules", "saved"}
"""Rooms that are public as a whole: ``rg.rules.ClipNorm``."""

__all__ = sorted({*_HOMES, *_ROOMS})  # noqa: PLE0605  # one list, and a test holds it against a literal one


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'retrograd' has no attribute {name!r}")
    with _random_kept():  # rich draws when it is loaded, and a script may have seeded before
        home = import_module(f"retrograd.{_HOMES.get(name, name)}")
    if name in _ROOMS:
        return home
    thing = getattr(home, name)
    globals()[name] = thing
    return thing


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
