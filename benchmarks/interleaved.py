"""Contenders measured against a bare step: CPU time, interleaved in one process.

In every round each contender is measured once, for about so many seconds, beginning with another one each time; the
bare step is measured between any two of them, and a contender's CPU time a step is divided by the mean of its two
neighbours'. The tables show the medians of these ratios. ``time.process_time`` counts all threads.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from contenders import Contender, Group
from nets import Net


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


class Cost(NamedTuple):
    """CPU seconds a step."""

    all_threads: float
    this_thread: float


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
    names = list(group.contenders)
    ratios: dict[str, list[Cost]] = {name: [] for name in names}
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    for contender in group.contenders.values():
        time_contender(contender, net, seconds=0.0)  # loads what is loaded at first use
    for number in range(rounds):
        before = time_contender(group.bare, net, seconds, steps)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            show(f"{net_name}: round {number + 1} of {rounds}: {name}")
            cost = time_contender(group.contenders[name], net, seconds, steps)
            after = time_contender(group.bare, net, seconds, steps)
            costs[name].append(cost)
            ratios[name].append(Cost(*(2 * c / (b + a) for c, b, a in zip(cost, before, after, strict=True))))
            before = after
    show("")
    for name in names:
        yield summarise(net_name, name, costs[name], ratios[name])


def summarise(net: str, contender: str, costs: list[Cost], ratios: list[Cost]) -> Measure:
    low, middle, high = statistics.quantiles([ratio.all_threads for ratio in ratios], n=4, method="inclusive")
    return Measure(
        net=net,
        contender=contender,
        ratio=middle,
        low=low,
        high=high,
        thread_ratio=statistics.median(ratio.this_thread for ratio in ratios),
        milliseconds=statistics.median(cost.all_threads for cost in costs) * 1e3,
    )


def show(text: str) -> None:
    """Progress, on one line of stderr."""
    print(f"\r{text:78}", end="", file=sys.stderr, flush=True)


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
            texts = [f"{c.ratio:.3f} [{c.low:.3f} {c.high:.3f}] {c.thread_ratio:.3f}" if c else "" for c in found]
            print(f"{row:45}" + "".join(f"{text:>28}" for text in texts))
