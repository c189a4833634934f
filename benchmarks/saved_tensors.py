"""Where saved tensors wait, by memory and by time: plain autograd, what torch and its documentation offer, and ours.

    python benchmarks/saved_tensors.py --markdown

Runs on the CPU, and on a CUDA device where there is one; it says which machine it saw. In each round every contender
makes a few steps, and bare steps are measured between any two of them: a ratio is that of a contender's time a step to
the mean of its two neighbours'. ../docs/saved_tensors.md says how to read the table.

There are bars for three nets on a device. Budgets are chosen such that the peak of the allocator can meet them, and it
is said whether it does, and at which price:

    python benchmarks/saved_tensors.py --nets resnet152
    python benchmarks/saved_tensors.py --nets resnet152 --mixed --channels-last
    python benchmarks/saved_tensors.py --nets gpt2-medium --mixed

``--only budget`` measures the bars alone, ``--only "budget, at most 15 GB"`` one of them. All contenders of the first
net take a quarter of an hour, and 90 GB of pinned memory; with ``--minutes 9`` no round is begun that would last longer
than that. What is measured is printed as it comes, and what does not fit into the device's memory has a row that says
so.
"""

from __future__ import annotations

import gc
import io
import math
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from device import (
    DEVICE,
    ON_DEVICE,
    LinkSpeed,
    describe_machine,
    forget_peak,
    held_bytes,
    measure_link,
    peak_bytes,
    read_status,
    release_memory,
    synchronize,
    use_tf32,
)
from nets import Net, make_gpt2, make_gpt2_medium, make_resnet
from retrograd.core.amounts import show_bytes
from retrograd.core.errors import RetrogradError
from retrograd.memory.budget.planned import Planned
from saved_contenders import CONTENDERS, Attached, Contender, budgeted, nothing
from timing import interleave, make_plain_parser, say, show

T = TypeVar("T")

NETS: dict[str, Callable[[], Net]] = {
    "resnet50": make_resnet,
    "resnet152": lambda: make_resnet(152, 256, 224),
    "resnet-small": lambda: make_resnet(14, 4, 64),
    "gpt2": make_gpt2,
    "gpt2-medium": make_gpt2_medium,
}


class Bar(NamedTuple):
    """What a budget on a device should reach: so small a peak at no more than this ratio of step times.

    A peak is bytes of the allocator; a share is of the saved tensors, and all else comes on top.
    """

    peak: float
    ratio: float

    def limit(self, counted: int, beside: int) -> int:
        """Bytes of the allocator, where so many are saved tensors and so many are not."""
        return round(self.peak) if self.peak > 1 else beside + round(self.peak * counted)


class Goal(NamedTuple):
    """The bars of a net, and how long a bare step was taken to last when they were set, for an H200.

    They count on what leaves beside the forward, a third of a step, over a link of :data:`ASSUMED_LINK`.
    """

    seconds: float
    bars: tuple[Bar, ...]


ASSUMED_LINK = 55e9
"""Bytes a second, each way."""
GOALS: dict[tuple[str, bool, bool], Goal] = {
    ("resnet152", False, False): Goal(0.51, (Bar(24e9, 1.08), Bar(15e9, 1.12), Bar(8e9, 1.40))),
    ("resnet152", True, True): Goal(0.16, (Bar(13e9, 1.08), Bar(9.5e9, 1.12), Bar(5e9, 1.40))),
    ("gpt2-medium", True, False): Goal(0.188, (Bar(1 / 2, 1.10), Bar(1 / 5, 1.22))),
    ("resnet-small", False, False): Goal(1.0, (Bar(1 / 2, 10.0),)),
}
"""Net, whether under autocast, whether in channels_last. Float32 products are computed as TF32 on a device.

The last one is no goal: it runs on the CPU what the others run on a device.
"""


SHARES = (0.5, 0.25, 0.15)
"""Budgets where there is no bar."""
ATTEMPTS = 4
"""Budgets that are tried for a bar."""
WARM_UPS = 2
"""Steps after which a plan is what it will be."""
MEMORY_STEPS = 3


# ---- memory ---------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Bytes after the forward, with the page cache, and at the peak of a step, beyond those between two bare steps.

    So what a contender holds all the time is counted. On a device the peak is that of the allocator, weights included.
    """

    after_forward: int
    peak: int


def warm_up(net: Net, attached: Attached, mixed: bool) -> None:
    """Make some steps, after which nothing is left but what is kept over steps."""
    for _ in range(WARM_UPS):
        run_step(net, attached, mixed)
    gc.collect()
    net.model.zero_grad(set_to_none=True)


def measure_memory(contender: Contender, net: Net, mixed: bool) -> Memory:
    release_memory()
    with nothing(net) as bare:
        warm_up(net, bare, mixed)
        before, floor = held_bytes(), 0 if ON_DEVICE else read_status("VmRSS")
    with contender(net) as attached:
        warm_up(net, attached, mixed)
        found = [measure_step(net, attached, mixed) for _ in range(MEMORY_STEPS)]
    least = Memory(*map(min, zip(*found, strict=True)))  # on the CPU the heap adds what is free between pieces
    return Memory(least.after_forward - before, least.peak - floor)


def measure_step(net: Net, attached: Attached, mixed: bool) -> Memory:
    forget_peak()
    with attached.around(), autocast(mixed):
        loss = net.loss(net.model(net.inputs))
    attached.settle()
    after_forward = held_bytes() + attached.cached()
    loss.backward()
    del loss
    found = Memory(after_forward, peak_bytes())
    net.model.zero_grad(set_to_none=True)
    return found


class Task(NamedTuple):
    """A bar, and the budget of saved tensors that can meet it.

    Attributes:
        limit: bytes of the allocator.
        ratio: of step times.
        policy: None where nothing is left for saved tensors.
    """

    limit: int
    ratio: float
    policy: Planned | None


def make_tasks(bars: tuple[Bar, ...], net: Net, mixed: bool, only: Sequence[str]) -> dict[str, Task]:
    """A budget for each bar that is asked for: its limit, less what no saved tensor is at the peak of a step.

    That is first taken to be the peak of a bare step without the most that it keeps, and the gradients: they are there
    when the pass ends, where a bare step holds little else, but one under a budget may still hold all of it. What the
    backward pass makes where a bare step has its peak no more is seen when a budget is tried.
    """
    everything = Planned(1.0)
    measure_memory(budgeted(everything), net, mixed)
    counted = everything.plan.kept_peak if everything.plan is not None else 0
    gradients = sum(parameter.nbytes for parameter in net.model.parameters() if parameter.requires_grad)
    beside = measure_memory(nothing, net, mixed).peak - counted + gradients
    print(f"{show_bytes(counted)} are saved at the peak of a bare step; {show_bytes(beside)} are left for all else.\n")
    tasks = {}
    for bar in bars:
        limit = bar.limit(counted, beside)
        name = f"**budget, at most {show_bytes(limit)}**"
        if is_asked(name, only):
            show(f"looking for a budget: {name}")
            tasks[name] = Task(limit, bar.ratio, find_budget(limit, limit - beside, net, mixed))
    return tasks


def find_budget(limit: int, budget: int, net: Net, mixed: bool) -> Planned | None:
    """One with which the peak of the allocator is within the limit, or the last that was tried."""
    policy = None
    for _ in range(ATTEMPTS):
        if budget <= 0:
            return policy
        policy = Planned(budget)
        try:
            excess = measure_memory(budgeted(policy), net, mixed).peak - limit
        except RetrogradError:  # too small; said when it is measured
            return policy
        if excess <= 0:
            return policy
        budget -= excess
    return policy


# ---- time -----------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Seconds a step, and CPU seconds of all threads."""

    wall: float
    cpu: float


@dataclass
class Measures:
    """One contender: its ratios to bare steps, one a round, and the seconds that these took."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)

    def add(self, cost: Cost, before: Cost, after: Cost) -> None:
        self.wall.append(2 * cost.wall / (before.wall + after.wall))
        self.cpu.append(2 * cost.cpu / (before.cpu + after.cpu))
        self.bare += [before.wall, after.wall]


def autocast(mixed: bool) -> AbstractContextManager[Any]:
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=mixed)


def run_step(net: Net, attached: Attached, mixed: bool) -> None:
    net.model.zero_grad(set_to_none=True)
    with attached.around(), autocast(mixed):
        loss = net.loss(net.model(net.inputs))
    loss.backward()


def time_contender(contender: Contender, net: Net, steps: int, mixed: bool) -> Cost:
    release_memory()
    with contender(net) as attached:
        run_step(net, attached, mixed)
        synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            run_step(net, attached, mixed)
        synchronize()
        return Cost((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps)


def attempt(name: str, net: Net, measure: Callable[[], T]) -> T | str:
    """What is measured; or, where that is not possible, why not, which is also said at once."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        reason = "does not fit"
    except (RetrogradError, ImportError, OSError, RuntimeError) as error:  # no plan, a full disk, no pinned memory
        reason = f"is left out: {str(error).partition(chr(10))[0]}"
    say(f"{name.strip('*')} {reason}")
    net.model.zero_grad(set_to_none=True)
    gc.collect()  # what failed is held by the frames of the error no more
    return reason


def measure_times(
    contenders: dict[str, Contender], net: Net, rounds: int, steps: int, mixed: bool, seconds: float
) -> dict[str, Measures]:
    """Rounds are begun as long as they will end within so many seconds; the first one always."""
    measures = {name: Measures() for name in contenders}

    def measure(name: str) -> Cost | None:
        found = attempt(name, net, partial(time_contender, contenders[name], net, steps, mixed))
        return found if isinstance(found, Cost) else None

    measure_bare = partial(time_contender, nothing, net, steps, mixed)
    for name, cost, before, after in interleave(contenders, rounds, measure, measure_bare, seconds):
        measures[name].add(cost, before, after)
        bare = statistics.mean(measures[name].bare[-2:])
        say(f"{name.strip('*')}: {cost.wall:.4g} s, {measures[name].wall[-1]:.3f} times {bare:.4g} s of a bare step")
    return measures


# ---- the table ------------------------------------------------------------------------------------------------


def spread(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return f"{middle:.2f} [{low:.2f} {high:.2f}]"


def print_rows(rows: list[list[str]], markdown: bool) -> None:
    """A table; the first row is its head."""
    if markdown:
        rows = [rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:]]
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        texts = (f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True))
        print(f"{first.replace('*', ''):{widths[0]}}  {'  '.join(texts)}")


def print_tasks(tasks: dict[str, Task], memory: dict[str, Memory], measures: dict[str, Measures]) -> None:
    """Whether the bars hold."""
    for name, task in tasks.items():
        bar = f"\nAt most {show_bytes(task.limit)} at {task.ratio:.2f} times"
        if task.policy is None:
            print(f"{bar}: that is less than what is there beside saved tensors.")
        elif name in measures and measures[name].wall:
            peak, ratio = memory[name].peak, statistics.median(measures[name].wall)
            holds = peak <= task.limit and ratio <= task.ratio
            print(f"{bar}: {show_bytes(peak)} at {ratio:.3f} times, so it {'holds' if holds else 'does not hold'}.")


def print_goal(goal: Goal, link: LinkSpeed, measures: dict[str, Measures]) -> None:
    """What the bars were set for, what was found, and what that does to them."""
    bare = [seconds for measured in measures.values() for seconds in measured.bare]
    if not bare:
        return
    seconds = statistics.median(bare)
    assumed, found = goal.seconds / 3 * ASSUMED_LINK, seconds / 3 * link.out
    then, now = show_bytes(round(assumed)), show_bytes(round(found))
    print(
        f"\nA bare step takes {seconds:.3f} s, and the bars were set for {goal.seconds} s (an H200) and"
        f" {ASSUMED_LINK / 1e9:.0f} GB/s. In a third of it, the forward, {now} can leave unseen instead of {then}:"
        f" the bars are {'easier' if found > assumed else 'harder'} by the difference."
    )


def is_asked(name: str, only: Sequence[str]) -> bool:
    return any(text in name for text in only)


def benchmark(name: str, arguments: Namespace) -> None:
    """Measure the contenders on one net, and print what was found."""
    mixed, only, began = arguments.mixed, arguments.only, time.perf_counter()
    torch.manual_seed(0)
    net = NETS[name]()
    net.to(DEVICE, torch.channels_last if arguments.channels_last else torch.preserve_format)
    print(f"{describe_machine()}; {name}{', mixed' * mixed}{', channels_last' * arguments.channels_last}")
    goal = GOALS.get((name, mixed, arguments.channels_last)) if ON_DEVICE or name == "resnet-small" else None
    link = measure_link() if ON_DEVICE else None
    if link is not None:
        print(f"The link: {link}.")
    if isinstance(attempt("a bare step", net, partial(measure_memory, nothing, net, mixed)), str):
        return
    tasks: dict[str, Task] = {}
    if goal is not None and any(text in "budget" or "budget" in text for text in only):
        found = attempt("a budget", net, partial(make_tasks, goal.bars, net, mixed, only))
        tasks = found if isinstance(found, dict) else {}
    policies = {name: task.policy for name, task in tasks.items() if task.policy is not None}
    if goal is None:
        policies = {f"**budget {share:.0%}**": Planned(share) for share in SHARES}
    contenders = CONTENDERS | {name: budgeted(policy) for name, policy in policies.items()}
    memory: dict[str, Memory] = {}
    failed: dict[str, str] = {}
    for contender in (name for name in contenders if is_asked(name, only)):
        show(f"memory: {contender}")
        measured = attempt(contender, net, partial(measure_memory, contenders[contender], net, mixed))
        if isinstance(measured, Memory):
            memory[contender] = measured
            held, peak = (show_bytes(nbytes) for nbytes in measured)
            say(f"{contender.strip('*')}: {held} held after the forward, {peak} at the peak")
        else:
            failed[contender] = measured
    left = 60 * arguments.minutes - (time.perf_counter() - began)
    chosen = {name: contenders[name] for name in memory}
    measures = measure_times(chosen, net, arguments.rounds, arguments.steps, mixed, left)
    print_table(memory, measures, failed, arguments.markdown)
    for contender, policy in policies.items():
        if contender in measures and policy.plan is not None:
            print(f"\n{contender.strip('*')}: {str(policy.plan).splitlines()[0]}")
    if goal is not None:
        print_goal(goal, link or LinkSpeed(*[ASSUMED_LINK] * 4), measures)
    print_tasks(tasks, memory, measures)


def print_table(
    memory: dict[str, Memory], measures: dict[str, Measures], failed: dict[str, str], markdown: bool
) -> None:
    """A row for each contender, also for those of which there is nothing to tell but why."""
    peak = "peak of the allocator, MB" if ON_DEVICE else "peak, MB"
    rows = [["", "held after the forward, MB", peak, "CPU time", "wall time"]]
    for contender, measured in measures.items():
        held = [f"{nbytes / 1e6:,.0f}" for nbytes in memory[contender]]
        times = [spread(measured.cpu), spread(measured.wall)] if measured.wall else ["", "does not fit"]
        rows.append([contender, *held, *times])
    print_rows(rows + [[contender, reason, "", "", ""] for contender, reason in failed.items()], markdown)


def main() -> None:
    parser = make_plain_parser(__doc__, NETS)
    parser.set_defaults(nets=["resnet152" if ON_DEVICE else "resnet50"])
    if ON_DEVICE:
        parser.set_defaults(rounds=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of a contender in a round")
    parser.add_argument("--mixed", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="for each net; no round is begun that lasts longer"
    )
    arguments = parser.parse_args()
    use_tf32()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what ends early has said what it knows
    for name in arguments.nets:
        benchmark(name, arguments)


if __name__ == "__main__":
    main()
