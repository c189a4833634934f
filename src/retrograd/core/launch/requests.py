"""``retrograd run``: its options, which travel to the processes of the program.

Adding an option is one line here. Loads without torch, and within a moment, as ``--help`` does; so do the requests of
other parts, in ``launch/requests.py`` of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from retrograd.core.addresses import local_path
from retrograd.core.errors import SavedTensorError, ScheduleError
from retrograd.core.launch.interpreter import OURS
from retrograd.core.launch.options import option
from retrograd.core.launch.start import Request
from retrograd.core.limits import LIMITS
from retrograd.core.notices import say
from retrograd.core.plugins import list_provided
from retrograd.core.runs.chosen_ranks import read_ranks

if TYPE_CHECKING:
    from retrograd.core.recording.schedule import NamedSchedule

MIRROR = f"{OURS}MIRROR"
"""Environment variable with the number of the process that tells a tracker of the run."""


def folder_option(parent: str) -> Any:
    """The option that names the folder."""
    what = "run folder" if parent == "runs" else "folder"
    words = f"{what}; {{date}} in its name is date and time (default: {parent}/<script>-{{date}})"
    return option("-o --output", "", words, metavar="DIR")


def _check_patterns(name: str, patterns: tuple[str, ...]) -> None:
    from retrograd.core.sites.selection import Selection

    Selection(patterns)


def _check_every(name: str, steps: int) -> None:
    if steps < 1:
        raise ScheduleError(
            f"{name} {steps} records nothing.", repair=f"give a whole number of at least 1, as in {name} 10."
        )


def _check_overhead(name: str, share: str) -> None:
    from retrograd.core.recording.schedule import read_overhead

    read_overhead(share)


def _check_ranks(name: str, ranks: str) -> None:
    read_ranks(ranks)


def check_number(name: str, number: int) -> None:
    """Check the number of a backward pass.

    Raises:
        SavedTensorError: it is negative.
    """
    if number < 0:
        raise SavedTensorError(f"{name} {number} is before the first.", repair="count from 0.")


@dataclass(frozen=True, kw_only=True)
class RunRequest(Request):
    """Record a training script, unmodified.

    Attributes:
        watch: whether what is too expensive for every recording is recorded too: writes, where NaN is made, kinks.
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
  retrograd run --overhead 5% train.py              as many steps as that pays for
  retrograd run --inventory 1 train.py
  retrograd run --open train.py                    its page in the browser, live
  retrograd run --mirror wandb train.py            a few series and all findings there, live
  retrograd run torchrun --nproc-per-node 2 train.py
  retrograd run --ranks 0,8 torchrun --nproc-per-node 16 train.py

Arguments after the script are passed to the script; its output and its exit code are its own. On stderr it prints
a line at the start, critical findings at once, and all findings at the end.
"""

    shown: str = folder_option("runs")
    sites: tuple[str, ...] | None = option(
        "--sites", None, "what to record, as in 'blocks.*:output.grad'", metavar="PATTERN", check=_check_patterns
    )
    every: int | None = option(
        "--every", None, "record every N-th step", metavar="N", check=_check_every, group="steps"
    )
    schedule: Literal["log"] | None = option(
        "--schedule", None, "record every step at first, then fewer and fewer", group="steps"
    )
    overhead: str | None = option(
        "--overhead",
        None,
        "record as many steps as take this share of a step's time, or none for every step (default: all of the first "
        "minute, then 10%%)",
        metavar="SHARE",
        check=_check_overhead,
        group="steps",
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
        check=check_number,
    )
    resume: bool = option("--resume", False, "continue the run that DIR holds")
    ranks: str = option(
        "--ranks",
        "all",
        "of several processes, which record: all, ranks as in 0,8,16, or a share as in 1/8 (default: all)",
        metavar="RANKS",
        check=_check_ranks,
    )
    quiet: bool = option("-q --quiet", False, "print errors only")
    live: bool = option("--live", False, "serve the page of the report while it trains, and print its address")
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
        from retrograd.core.recording.schedule import every, log_schedule, overhead, read_overhead

        if self.schedule:
            return log_schedule()
        if self.every is not None or self.watch:
            return every(self.every or 1)
        return (
            overhead(0.1, full_seconds=LIMITS.full_seconds) if self.overhead is None else read_overhead(self.overhead)
        )

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

            address, file = serve_beside(local_path(self.path), is_opened=self.open)
            say(f"live, while it runs: {address}")
            if self.open:
                show_in_browser(address, file)
        return variables


def list_requests() -> Iterator[type[Request]]:
    """All commands that run a program, the quickest to load first; the bootstrap has their sessions."""
    yield RunRequest
    yield from chain.from_iterable(list_provided("requests"))
