"""What a recording holds: bytes beyond the bare step, and tensors that stay alive.

    python benchmarks/memory.py --steps 50

Each measurement runs in a process of its own, with the garbage collector off, so that a reference cycle shows as
growth. Bytes are those of the whole process, which has given back what it does not use; measured at two depths they
split into what a recording costs at all and what each site adds.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import sys
from dataclasses import dataclass

import psutil
import pyarrow
import torch

from contenders import PLAIN, Contender, list_ours
from nets import make_mlp

CONTENDERS: dict[str, Contender] = PLAIN | list_ours()
SHALLOW, DEEP = 50, 500


@dataclass
class Held:
    """What a process holds after some steps that it did not hold before the contender was attached.

    Attributes:
        sites: outputs and gradients.
        resident: bytes, at the end of the steps.
        growth: bytes gained between the middle and the end.
        tensors: tensors gained between the beginning and the end.
    """

    sites: int
    resident: int
    growth: int
    tensors: int


def resident_bytes() -> int:
    """Memory of this process after the allocators have returned what is free."""
    pyarrow.default_memory_pool().release_unused()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def live_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def warm_up(contender: Contender) -> None:
    """Have everything loaded that is loaded at first use."""
    with contender(make_mlp(width=1, batch=1, layers=1)) as (step, finish):
        step()
        finish()


def measure(name: str, layers: int, steps: int) -> Held:
    """Attach to a net of so many layers and look at what is held while and after it makes its steps."""
    torch.set_num_threads(1)
    warm_up(CONTENDERS[name])
    net = make_mlp(width=32, batch=8, layers=layers)
    for _ in range(5):
        net.step()
    gc.collect()
    gc.disable()
    before = resident_bytes()
    with CONTENDERS[name](net) as (step, finish):
        for _ in range(5):
            step()
        finish()
        tensors = live_tensors()
        for _ in range(steps // 2):
            step()
        finish()
        middle = resident_bytes()
        for _ in range(steps - steps // 2):
            step()
        finish()
        end = resident_bytes()
        sites = 2 * sum(1 for _ in net.model.modules())
        return Held(sites, end - before, end - middle, live_tensors() - tensors)


def measure_apart(name: str, layers: int, steps: int) -> Held:
    """Measure in a new process."""
    print(f"{name}: {layers} layers".ljust(60), end="\r", file=sys.stderr, flush=True)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (name, layers, steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="rows whose name contains one of these")
    parser.add_argument("--markdown", action="store_true", help="print the table of the documentation")
    arguments = parser.parse_args()
    steps: int = arguments.steps
    if arguments.markdown:
        print("| | MB at all | MB per 100 sites | tensors gained | kB gained a step |\n|---|---:|---:|---:|---:|")
    else:
        print(f"{'':34}{'MB at all':>12}{'MB per 100 sites':>18}{'tensors gained':>16}{'kB gained a step':>18}")
    for name in (name for name in CONTENDERS if any(text in name for text in arguments.only)):
        shallow, deep = (measure_apart(name, layers, steps) for layers in (SHALLOW, DEEP))
        per_site = (deep.resident - shallow.resident) / (deep.sites - shallow.sites)
        at_all = shallow.resident - per_site * shallow.sites
        growth = deep.growth / (steps - steps // 2)
        found = f"{at_all / 1e6:.2f}", f"{per_site / 1e4:.3f}", str(deep.tensors), f"{growth / 1e3:.1f}"
        if arguments.markdown:
            print("|", " | ".join((name, *found)), "|", flush=True)
        else:
            print(f"{name:34}{found[0]:>12}{found[1]:>18}{found[2]:>16}{found[3]:>18}", flush=True)


if __name__ == "__main__":
    main()
