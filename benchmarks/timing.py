"""Contenders measured against a bare step: CPU time, interleaved in one process. What benchmarks of steps share.

In every round each contender is measured once, for about so many seconds, beginning with another one each time; the
bare step is measured between any two of them, and a contender's CPU time a step is divided by the mean of its two
neighbours'. The tables show the medians of these ratios. ``time.process_time`` counts all threads.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Generic, NamedTuple, TextIO, TypeVar

import torch

from contenders import Contender, Group
from nets import Net
from retrograd.core.amounts import count_of

T = TypeVar("T")


@dataclass
class Measure:
    """One contender on one net.

    Attributes:
        net, contender: which.
        ratio: median over rounds of its CPU time a step to that of the bare step, all threads.
        low, high: quartiles of that ratio.
        thread_ratio: the same median for the training thread alone.
        milliseconds: median CPU time a step, all threads.
    """

    net: str
    contender: str
    ratio: float
    low: float
    high: float
    thread_ratio: float
    milliseconds: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} [{self.low:.3f} {self.high:.3f}] {self.thread_ratio:.3f}"


class Cost(NamedTuple):
    """CPU seconds a step."""

    all_threads: float
    this_thread: float


class Turn(NamedTuple, Generic[T]):
    """One measurement, and those of the bare step before and after it."""

    name: str
    found: T
    before: T
    after: T


def interleave(
    names: Collection[str],
    rounds: int,
    measure: Callable[[str], T | None],
    measure_bare: Callable[[], T],
    seconds: float = math.inf,
) -> Iterator[Turn[T]]:
    """Measure everything once in each round, and the bare step in between.

    Args:
        names: what is measured.
        rounds: how many; those that would last longer than ``seconds`` are not begun, but for the first.
        measure: measures one; None where that is not possible, and then it is not tried again.
        measure_bare: measures the bare step.
        seconds: for all rounds.
    """
    left = list(names)
    began, longest = time.perf_counter(), 0.0
    for number in range(rounds):
        round_began = time.perf_counter()
        if not left or (number and round_began - began + longest > seconds):
            return
        before = measure_bare()
        start = number % len(left)
        for name in left[start:] + left[:start]:
            show(f"round {number + 1} of {rounds}: {name}")
            found = measure(name)
            after = measure_bare()
            if found is None:
                left.remove(name)
            else:
                yield Turn(name, found, before, after)
            before = after
        longest = max(longest, time.perf_counter() - round_began)
    show("")


def time_contender(contender: Contender, net: Net, seconds: float, steps: int = 0) -> Cost:
    """Attach, warm up, measure so many steps, or as many as fit, detach."""
    with contender(net) as (step, finish):
        step()
        started = time.perf_counter()
        step()
        count = steps or max(2, round(seconds / (time.perf_counter() - started)))
        gc.collect()
        all_threads, this_thread = time.process_time(), time.thread_time()
        for _ in range(count):
            step()
        this_thread = time.thread_time() - this_thread
        finish()
        return Cost((time.process_time() - all_threads) / count, this_thread / count)


def measure_group(
    net_name: str, make_net: Callable[[], Net], group: Group, rounds: int, seconds: float, steps: int = 0
) -> Iterator[Measure]:
    """Measure the contenders of a group against its bare step; for so many steps each, where that is given."""
    torch.manual_seed(0)
    net = make_net()
    ratios: dict[str, list[Cost]] = {name: [] for name in group.contenders}
    costs: dict[str, list[Cost]] = {name: [] for name in group.contenders}
    for contender in group.contenders.values():
        time_contender(contender, net, seconds=0.0)  # loads what is loaded at first use

    def measure(name: str) -> Cost:
        return time_contender(group.contenders[name], net, seconds, steps)

    measure_bare = partial(time_contender, group.bare, net, seconds, steps)
    for turn in interleave(group.contenders, rounds, measure, measure_bare):
        costs[turn.name].append(turn.found)
        ratios[turn.name].append(Cost(*(2 * c / (b + a) for c, b, a in zip(*turn[1:], strict=True))))
        so_far = statistics.median(ratio.all_threads for ratio in ratios[turn.name])
        say(f"{net_name}, {turn.name}: {so_far:.3f} after {count_of(len(costs[turn.name]), 'round')}", sys.stderr)
    for name in group.contenders:
        yield summarise(net_name, name, costs[name], ratios[name])


def measure_all(groups: Iterable[Group], nets: Mapping[str, Callable[[], Net]], arguments: argparse.Namespace) -> None:
    """Measure the groups on the nets that were asked for.

    What each row has come to is said on stderr after each round, each row when its rounds are done, the table at last.
    """
    measures: list[Measure] = []
    for group in filter(None, (choose(group, arguments.only) for group in groups)):
        for net in arguments.nets:
            for found in measure_group(net, nets[net], group, arguments.rounds, arguments.seconds, arguments.steps):
                say(f"{net}, {found.contender}: {found}", sys.stderr if arguments.json else sys.stdout)
                measures.append(found)
    if arguments.json:
        print(json.dumps([asdict(measure) for measure in measures], indent=1))
    else:
        print_table(measures, arguments.nets, arguments.markdown)


def choose(group: Group, only: Collection[str]) -> Group | None:
    """The contenders of a group whose names contain one of these texts; None where there is none."""
    chosen = {name: each for name, each in group.contenders.items() if any(text in name for text in only)}
    return Group(chosen, group.bare) if chosen else None


def summarise(net: str, contender: str, costs: list[Cost], ratios: list[Cost]) -> Measure:
    found = [ratio.all_threads for ratio in ratios]
    low, middle, high = statistics.quantiles(found * 2 if len(found) == 1 else found, n=4, method="inclusive")
    return Measure(
        net=net,
        contender=contender,
        ratio=middle,
        low=low,
        high=high,
        thread_ratio=statistics.median(ratio.this_thread for ratio in ratios),
        milliseconds=statistics.median(cost.all_threads for cost in costs) * 1e3,
    )


# ---- what is asked for ----


def make_plain_parser(text: str, nets: Collection[str]) -> argparse.ArgumentParser:
    """A parser for a benchmark that says this of itself and measures these nets. One thread is used from here on."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--nets", nargs="+", choices=nets, default=list(nets))
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="rows whose name contains one of these")
    parser.add_argument("--markdown", action="store_true", help="print the table of the documentation")
    return parser


def make_parser(text: str, nets: Collection[str]) -> argparse.ArgumentParser:
    """The same for one that measures by :func:`measure_all`."""
    parser = make_plain_parser(text, nets)
    keep_freed_memory()
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one measurement")
    parser.add_argument("--steps", type=int, default=0, help="measure so many steps each, however long they take")
    parser.add_argument("--json", action="store_true", help="print the measures as JSON")
    return parser


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, where it is glibc.

    It gives memory back whenever the top of its heap is free. Whether a step takes it anew, page by page, is then
    decided by what happens to lie at the top: one bare step had 0 to 2,700 page faults, and took 9.4 to 12.6 ms.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library; on Windows there is no name for it
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    for option, value in ((trim_threshold, 2**31 - 1), (top_pad, 2**28), (mmap_threshold, 2**31 - 1)):
        set_option(option, value)


# ---- what is printed ----


def show(text: str) -> None:
    """Progress, on one line of stderr."""
    print(f"\r{text:78}", end="", file=sys.stderr, flush=True)


def say(text: str, file: TextIO | None = None) -> None:
    """Print what was measured in place of the progress."""
    show("")
    print(f"\r{text:78}", file=file, flush=True)


def print_table(measures: list[Measure], nets: list[str], markdown: bool) -> None:
    """One row a contender, one column a net."""
    rows = list(dict.fromkeys(measure.contender for measure in measures))
    cells = {(measure.contender, measure.net): measure for measure in measures}
    if markdown:
        print("|", *(f"| {net}" for net in nets), "|")
        print("|---|" + "---:|" * len(nets))
    else:
        print(f"{'median [quartiles], this thread':45}" + "".join(f"{net:>28}" for net in nets))
    for row in rows:
        found = [cells.get((row, net)) for net in nets]
        if markdown:
            print(f"| {row}", *(f"| {cell.ratio:.3f}" if cell else "|" for cell in found), "|")
        else:
            print(f"{row:45}" + "".join(f"{'' if cell is None else str(cell):>28}" for cell in found))
