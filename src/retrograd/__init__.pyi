# The public names, each with the file that it is from. `__init__.py` reads them here, and so do type checkers.
# What has another name than in its file (`load`), and parts of the package itself, are not in `__all__`.

from retrograd import integrations as integrations
from retrograd import testing as testing
from retrograd.core.errors import RetrogradError as RetrogradError
from retrograd.core.errors import RetrogradWarning as RetrogradWarning
from retrograd.core.exports.export import export as export
from retrograd.core.exports.mirror import Mirror as Mirror
from retrograd.core.exports.mirror import mirror as mirror
from retrograd.core.history.history import History as History
from retrograd.core.recording.keep import Keep as Keep
from retrograd.core.recording.keep import on_jump as on_jump
from retrograd.core.recording.keep import on_nonfinite as on_nonfinite
from retrograd.core.recording.logged import log as log
from retrograd.core.recording.record import Recording as Recording
from retrograd.core.recording.record import record as record
from retrograd.core.recording.record import watch as watch
from retrograd.core.recording.schedule import every as every
from retrograd.core.recording.schedule import log_schedule as log_schedule
from retrograd.core.recording.schedule import overhead as overhead
from retrograd.core.recording.settings import plan_recording as plan_recording
from retrograd.core.runs.compaction import compact as compact
from retrograd.core.runs.findings import Finding as Finding
from retrograd.core.runs.findings import Findings as Findings
from retrograd.core.runs.reader import Run as Run
from retrograd.core.runs.reader import open_run as load  # noqa: F401
from retrograd.core.runs.reader import open_run as open  # noqa: A004, F401
from retrograd.core.runs.reader import open_run as open_run
from retrograd.core.statistics.custom import statistic as statistic
from retrograd.core.views.report import write_report as report  # noqa: F401
from retrograd.core.views.report import write_report as write_report
from retrograd.core.views.table import format_table as format_table
from retrograd.core.views.table import print_table as print_table
from retrograd.core.views.text_heatmap import format_heatmap as format_heatmap
from retrograd.core.views.text_heatmap import print_heatmap as print_heatmap
from retrograd.explaining import findings as findings
from retrograd.explaining.card.card import Card as Card
from retrograd.explaining.card.describe import describe as describe
from retrograd.explaining.comparing.comparison import Comparison as Comparison
from retrograd.explaining.comparing.comparison import compare as compare
from retrograd.explaining.comparing.comparison import compare as diff  # noqa: F401
from retrograd.explaining.facts.nonfinite_probe import NotFinite as NotFinite
from retrograd.explaining.facts.nonfinite_probe import find_nan as find_nan
from retrograd.explaining.findings.explain import explain as explain
from retrograd.explaining.gradients.explain import GradientReasons as GradientReasons
from retrograd.explaining.gradients.explain import explain_gradients as explain_gradients
from retrograd.explaining.kinks.kinks import Kinks as Kinks
from retrograd.explaining.kinks.kinks import find_kinks as find_kinks
from retrograd.explaining.probes.checks import check_batch as check_batch
from retrograd.explaining.probes.checks import check_causal as check_causal
from retrograd.explaining.probes.result import Mixing as Mixing
from retrograd.explaining.views.comparing.comparison_page import write_comparison as write_comparison
from retrograd.following.bundles.bundle import open_bundle as open_bundle
from retrograd.following.bundles.replay import replay as replay
from retrograd.following.bundles.writer import write_bundle as write_bundle
from retrograd.following.engine.one_node import rerun as rerun
from retrograd.following.engine.replayer import run_from as run_from
from retrograd.following.graph.graph import Graph as Graph
from retrograd.following.graph.origins import record_origins as record_origins
from retrograd.following.graph.walker import walk as walk
from retrograd.following.hangs.watch import watch_hangs as watch_hangs
from retrograd.following.stepping.stepper import step_through as step_through
from retrograd.following.tracing.trace import Trace as Trace
from retrograd.following.tracing.tracer import trace as trace
from retrograd.following.views.chrome_trace import write_chrome_trace as write_chrome_trace
from retrograd.following.views.graph_picture import draw_graph as draw_graph
from retrograd.following.views.graph_text import format_graph as format_graph
from retrograd.following.views.graph_text import print_graph as print_graph
from retrograd.following.views.trace_events import LiveLines as LiveLines
from retrograd.following.views.trace_text import format_trace as format_trace
from retrograd.following.views.trace_text import print_trace as print_trace
from retrograd.memory import saved as saved
from retrograd.memory.inventory.inventory import Inventory as Inventory
from retrograd.memory.inventory.recorder import take_inventory as take_inventory
from retrograd.memory.saved.keeping import keep_saved as keep_saved
from retrograd.memory.views.inventory_page import write_inventory as write_inventory
from retrograd.memory.views.inventory_table import format_inventory as format_inventory
from retrograd.memory.views.inventory_table import print_inventory as print_inventory
from retrograd.rewriting import rules as rules
from retrograd.rewriting.rewriting import Rewriting as Rewriting
from retrograd.rewriting.rewriting import rewrite as rewrite
from retrograd.rewriting.rules.simulation import simulate_rule as simulate_rule
from retrograd.tools.adjoint.adjoint_check import AdjointCheck as AdjointCheck
from retrograd.tools.adjoint.check import check_adjoint as check_adjoint
from retrograd.tools.features.dataset import extract_dataset as extract_dataset
from retrograd.tools.features.extractor import extract as extract
from retrograd.tools.features.stored import open_features as open_features
from retrograd.tools.functions.call import Auxiliary as Auxiliary
from retrograd.tools.functions.function import Function as Function
from retrograd.tools.samples.gradients import per_sample_gradients as per_sample_gradients

__version__: str
__all__: list[str]  # noqa: PYI035  # __init__.py makes it of the names above

def _find_homes() -> dict[str, str]: ...
