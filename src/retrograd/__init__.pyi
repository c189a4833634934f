# The public names, each with the file that it is from. `__init__.py` reads them here, and so do type checkers.

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
from retrograd.views.trace_text import LiveLines as LiveLines
from retrograd.views.trace_text import print_trace as print_trace

__version__: str
__all__: list[str]  # noqa: PYI035  # __init__.py makes it of the names above
_HOMES: dict[str, str]
