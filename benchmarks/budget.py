"""What a budget for overhead comes to: two equal nets trained in turns, one of them recorded within it.

    python benchmarks/budget.py --shares 0.05 0.1 --pairs 40

Each pair of turns gives a ratio of CPU time, all threads. The recorded net first makes the steps that are recorded in
full, and those in which a gap is found. Printed are quartiles of the ratios, and what the recording has measured of
itself.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

import retrograd as rg
from nets import NETS
from retrograd.core.recording.schedule import describe_schedule
from timing import keep_freed_memory, say, show

STEPS = {"gpt2": (116, 2), "mlp": (300, 32), "mlp-tiny": (400, 64)}
"""Those that are made before any is measured, and those of a turn."""


def time_steps(step: Callable[[], None], count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        step()
    return time.process_time() - began


def measure(name: str, share: float, pairs: int) -> str:
    """Train and measure; returns what is printed."""
    bare, recorded = NETS[name](), NETS[name]()
    after, steps = STEPS[name]
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        with rg.record(recorded.model, f"{folder}/run", schedule=rg.overhead(share)) as recording:
            time_steps(bare.training_step, 2)
            time_steps(recorded.training_step, after)
            for number in range(pairs):
                show(f"{name}, {share:.0%}: {number} of {pairs} pairs")
                before = time_steps(bare.training_step, steps)
                ratios.append(time_steps(recorded.training_step, steps) / before)
        told = describe_schedule(recording.run.history.manifest)
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{name}, {share:.0%}: {middle:.3f} [{low:.3f} {high:.3f}]; {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.05, 0.1])
    parser.add_argument("--pairs", type=int, default=24, help="of turns")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for name in arguments.nets:
        for share in arguments.shares:
            say(measure(name, share, arguments.pairs))


if __name__ == "__main__":
    main()
