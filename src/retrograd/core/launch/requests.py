"""The commands that run a program: their options, which travel to its processes.

Adding an option is one line here; a command that runs a program is a class here, in ``REQUESTS``, and its session in
the bootstrap. Loads without torch, and within a moment, as ``--help`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from retrograd.core.addresses import local_path
from retrograd.core.errors import SavedTensorError, ScheduleError, TraceError
from retrograd.core.launch.interpreter import OURS
from retrograd.core.launch.options import Command, option
from retrograd.core.launch.start import Request, make_usage
from retrograd.core.notices import say
from retrograd.core.runs.chosen_ranks import read_ranks

if TYPE_CHECKING:
    from retrograd.core.recording.schedule import NamedSchedule

MIRROR = f"{OURS}MIRROR"
"""Environment variable with the number of the process that tells a tracker of the run."""

Passes = tuple[int, int | None]
"""First of some backward passes, counted from 0, and the one after the last; None for no end."""


def _folder(parent: str) -> Any:
    """The option that names the folder."""
    what = "run folder" if parent == "runs" else "folder"
    return option("-o --output", "", f"{what} (default: {parent}/<script>-<date>-<time>)", metavar="DIR")


def _check_patterns(name: str, patterns: tuple[str, ...]) -> None:
    from retrograd.core.sites.selection import Selection

    Selection(patterns)


def _check_every(name: str, steps: int) -> None:
    if steps < 1:
        raise ScheduleError(
            f"{name} {steps} records nothing.", repair=f"give a whole number from 1 on, as in {name} 10."
        )


def _check_ranks(name: str, ranks: str) -> None:
    read_ranks(ranks)


def _check_number(name: str, number: int) -> None:
    if number < 0:
        raise SavedTensorError(f"{name} {number} is before the first.", repair="count from 0.")


@dataclass(frozen=True, kw_only=True)
class RunRequest(Request):
    """Record a training script, unmodified.

    Attributes:
        watch: whether what is too dear for every recording is noted too: writes, where NaN is made, kinks.
        limit: how many steps are recorded before the program is ended; None for as many as it makes.
    """

    name: ClassVar[str] = "run"
    promise: ClassVar[str] = "recording {} in {}"
    parent: ClassVar[str] = "runs"
    done: ClassVar[str] = "recorded"
    leaves: ClassVar[str] = "rank*"
    see: ClassVar[str] = "see it with: retrograd report {}"
    examples: ClassVar[str] = """
examples:
  retrograd run train.py --lr 0.1
  retrograd run -o runs/first --every 10 -m package.train
  retrograd run --sites 'blocks.*:output.grad' '*:weight.grad' -- train.py
  retrograd run --tensors '*.attn:output' --schedule log train.py
  retrograd run --inventory 1 train.py
  retrograd run --open train.py                    its page in the browser, live
  retrograd run --mirror wandb train.py            a few series and all findings there, live
  retrograd run torchrun --nproc-per-node 2 train.py
  retrograd run --ranks 0,8 torchrun --nproc-per-node 16 train.py

What follows the command belongs to it, and so do its output and its exit code. To stderr go a line when it starts,
one at once for anything critical, and the findings when it ends.
"""

    shown: str = _folder("runs")
    sites: tuple[str, ...] | None = option(
        "--sites", None, "what to record, as in 'blocks.*:output.grad'", metavar="PATTERN", check=_check_patterns
    )
    every: int = option("--every", 1, "record every N-th step", metavar="N", check=_check_every, group="steps")
    schedule: Literal["log"] | None = option(
        "--schedule", None, "record every step at first, then fewer and fewer", group="steps"
    )
    tensors: tuple[str, ...] | None = option(
        "--tensors", None, "sites whose tensors are kept whole", metavar="PATTERN", check=_check_patterns
    )
    histogram: bool = option("--no-histogram", True, "no histograms of exponents")
    inventory: int | None = option(
        "--inventory",
        None,
        "show in the report what autograd keeps until backward pass N, counted from 0",
        metavar="N",
        check=_check_number,
    )
    resume: bool = option("--resume", False, "continue the run that DIR holds")
    ranks: str = option(
        "--ranks",
        "all",
        "of several processes, which record: all, ranks as in 0,8,16, or a share as in 1/8 (default: all)",
        metavar="RANKS",
        check=_check_ranks,
    )
    quiet: bool = option("-q --quiet", False, "print no findings, and nothing where all goes well")
    live: bool = option("--live", False, "serve the page of the report while it trains, and say its address")
    open: bool = option("--open", False, "the same, and show it in the browser")
    mirror: Literal["wandb", "mlflow", "tensorboard"] | None = option(
        "--mirror", None, "show the loss, gradients of some weights and all findings in this tracker while it trains"
    )
    watch: bool = False
    limit: int | None = None

    def make_schedule(self) -> NamedSchedule:
        """The schedule of recorded steps.

        Raises:
            ScheduleError: for a number of steps below 1.
        """
        from retrograd.core.recording.schedule import every, log_schedule

        return log_schedule() if self.schedule else every(self.every)

    def check(self) -> None:
        super().check()
        if self.limit is not None and self.limit < 1:
            raise ScheduleError(f"After {self.limit} steps there is nothing to explain.", repair="give at least 1.")

    def greet(self) -> str:
        return "" if self.quiet else super().greet()

    def accompany(self) -> Mapping[str, str]:
        variables = {}
        if self.mirror:
            from retrograd.core.launch.live_mirror import mirror_beside

            first = read_ranks(self.ranks).first
            variables[MIRROR] = str(mirror_beside(local_path(self.path), self.mirror, first=first, quiet=self.quiet))
        if self.live or self.open:
            from retrograd.core.launch.chosen_run import show_in_browser
            from retrograd.core.launch.live_page import serve_beside

            address = serve_beside(local_path(self.path))
            say(f"live, while it runs: {address}")
            if self.open:
                show_in_browser(address)
        return variables


@dataclass(frozen=True, kw_only=True)
class TraceRequest(Request):
    """Trace every node of some backward passes of an unmodified script."""

    name: ClassVar[str] = "trace"
    promise: ClassVar[str] = "tracing {} into {}"
    parent: ClassVar[str] = "traces"
    done: ClassVar[str] = "traced"
    leaves: ClassVar[str] = "rank*/chrome.json"
    see: ClassVar[str] = "see it in ui.perfetto.dev: {}/rank*/chrome.json"
    examples: ClassVar[str] = """
examples:
  retrograd trace train.py --lr 0.1
  retrograd trace --passes 100:102 --memory --by module train.py
  retrograd trace --live --nodes 'blocks.3*' --norms -m package.train
  retrograd trace -o traces/first torchrun --nproc-per-node 2 train.py

DIR/rank*/chrome.json opens in ui.perfetto.dev, and rg.Trace.load() reads DIR/rank*/trace.json.gz. The table goes to
stderr when the script has ended; the script's output and exit code are its own. When a traced pass raises, the
exception says in which node, and how to run that node again. After the traced passes only the last events are kept,
for `retrograd hangs DIR`.
"""

    shown: str = _folder("traces")
    passes: str = option(
        "--passes",
        "3",
        "the first N backward passes, or A to B-1 from 0 (default: 3)",
        metavar="N|A:B",
        check=lambda _, text: parse_passes(text),
    )
    nodes: str | None = option(
        "--nodes", None, "nodes to show, as in 'blocks.3*'; the files hold all", metavar="PATTERN"
    )
    live: bool = option("--live", False, "print each of them to stderr as soon as it has run")
    norms: bool = option("--norms", False, "norms of what goes in and comes out")
    memory: bool = option("--memory", False, "bytes that each node gains")
    by: Literal["node", "module", "kind"] = option("--by", "node", "what makes a line of the table")
    sort: Literal["time", "memory"] = option("--sort", "time", "order of the table")

    @property
    def span(self) -> Passes:
        """First of the backward passes to trace, counted from 0, and the one after the last; None for no end."""
        return parse_passes(self.passes)


@dataclass(frozen=True, kw_only=True)
class InventoryRequest(Request):
    """Find what autograd keeps between forward and backward in one step of an unmodified script."""

    name: ClassVar[str] = "inventory"
    promise: ClassVar[str] = "taking an inventory of {} into {}"
    parent: ClassVar[str] = "inventories"
    done: ClassVar[str] = "listed"
    leaves: ClassVar[str] = "rank*/inventory.html"
    see: ClassVar[str] = "see it in a browser: {}/rank*/inventory.html"
    examples: ClassVar[str] = """
examples:
  retrograd inventory train.py --batch-size 256
  retrograd inventory --pass 100 --by tensor -m package.train

DIR/rank*/inventory.html opens in a browser, and rg.Inventory.load() reads DIR/rank*/inventory.parquet. The table goes
to stderr when the script has ended; the script's output and exit code are its own.
"""

    shown: str = _folder("inventories")
    number: int = option(
        "--pass",
        1,
        "which backward pass, counted from 0 (default: 1, the second)",
        metavar="N",
        check=_check_number,
    )
    by: Literal["module", "node", "tensor"] = option("--by", "module", "what makes a line of the table")
    timed: bool = option("--timed", False, "measure how long operations take")


@dataclass(frozen=True, kw_only=True)
class DebugRequest(Request):
    """Stop inside the backward passes of an unmodified script, and look."""

    name: ClassVar[str] = "debug"
    promise: ClassVar[str] = "debugging {}; a prompt opens where a backward pass stops"
    examples: ClassVar[str] = """
examples:
  retrograd debug train.py
  retrograd debug --break 'blocks.3*' 'norm > 100' -- train.py --lr 0.1
  retrograd debug --break non-finite -m package.train

A prompt opens where a pass stops: at a breakpoint, at the first gradient that is not finite, at an exception.
"""

    breakpoints: tuple[str, ...] = option(
        "--break", (), "nodes, as in 'blocks.3*', or conditions, as in non-finite and 'norm > 100'", metavar="WHERE"
    )
    nonfinite: bool = option("--no-non-finite", True, "go on where a gradient is not finite")


REQUESTS: tuple[type[Request], ...] = (RunRequest, TraceRequest, InventoryRequest, DebugRequest)
"""All of them; the bootstrap has their sessions."""


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(Command):
    """The options of ``retrograd explain``: what to explain, and how."""

    name: ClassVar[str] = "explain"
    runs: ClassVar[bool] = True
    takes_run: ClassVar[bool] = True
    reads: ClassVar[bool] = True
    usage: ClassVar[str] = make_usage("explain", "[RUN]")
    examples: ClassVar[str] = """
examples:
  retrograd explain                                      the newest run below runs/
  retrograd explain runs/train-20250131-120000 -v        with the evidence
  retrograd explain runs/first --json --fail-on warning  JSON lines, and an exit code for CI
  retrograd explain train.py --lr 0.1                    run it, watched closely, and explain what it did
  retrograd explain --steps 20 -m package.train          no longer than 20 steps

A run is explained from its record alone. A command is run, and watched more closely than `retrograd run` does: also
writes to what autograd has saved, where exactly NaN is made, and points without a derivative. The exit code is that of
the command, or 0 for a run; 1 where --fail-on says so; 2 for an error of usage. Options after the script belong to it.
"""

    command: tuple[str, ...] = ()
    run: Path | None = option("RUN", None, "folder of a run (default: the newest)")
    verbose: bool = option("-v --verbose", False, "add the evidence for each finding, and what it explains")
    all: bool = option("--all", False, "all findings (default: at most five)")
    not_checked: bool = option("--not-checked", False, "what could not be checked, and why")
    json: bool = option("--json", False, "all findings, as lines of JSON")
    fail_on: Literal["critical", "warning", "note"] | None = option(
        "--fail-on", None, "exit with 1 if a finding is this severe, or worse"
    )
    steps: int | None = option("--steps", None, "of a command: end it after N steps", metavar="N")
    output: str | None = option("-o --output", None, "of a command: run folder, as for `retrograd run`", metavar="DIR")


def parse_passes(text: str) -> Passes:
    """Read a range of backward passes: ``3`` for the first three, ``10:12`` for 10 and 11, ``10:`` for all from 10 on.

    Raises:
        TraceError: for anything else, and for none at all.
    """
    begin, colon, end = text.rpartition(":")
    try:
        first, last = int(begin or 0), (int(end) if end or not colon else None)
    except ValueError:
        first, last = 0, 0
    if first < 0 or (last is not None and last <= first):
        raise TraceError(
            f"--passes {text} selects no backward pass.",
            repair="--passes 3 for the first three, --passes 10:12 for the passes 10 and 11, counted from 0.",
        )
    return first, last
