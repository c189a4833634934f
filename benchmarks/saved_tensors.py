"""Where saved tensors wait, by memory and by time: plain autograd, what torch and its documentation offer, and ours.

    python benchmarks/saved_tensors.py --rounds 9 --markdown

Runs on the CPU, and on a CUDA device where there is one, with a net that fits it; it says which machine it saw. In each
round every contender makes a few steps, and bare steps are measured between any two of them: a ratio is that of a
contender's time a step to the mean of its two neighbours'. ../docs/saved_tensors.md says how to read the table.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import psutil
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from interleaved import show
from nets import Block, Bottleneck, Net, make_gpt2, make_resnet
from retrograd.saved.cpu import Cpu
from retrograd.saved.disk import Disk
from retrograd.saved.keep import Keep
from retrograd.saved.keeping import Policies, keep_saved
from retrograd.saved.lossless import Lossless
from retrograd.saved.planned import Planned
from retrograd.saved.precision import Bfloat16, EightBit
from retrograd.saved.recompute import Recompute

BLOCKS = (Bottleneck, Block)
ON_DEVICE = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_DEVICE else "cpu")

NETS: dict[str, Callable[[], Net]] = {
    "resnet50": make_resnet,
    "resnet152": lambda: make_resnet(152, 256, 224),
    "gpt2": make_gpt2,
}


class Attached(NamedTuple):
    """What is measured: ``around`` the forward and backward of a step; ``settle`` ends what goes on behind them."""

    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    settle: Callable[[], object] = lambda: None
    cached: Callable[[], int] = lambda: 0


Contender = Callable[[Net], AbstractContextManager[Attached]]


# ---- what torch and its documentation offer -------------------------------------------------------------------


def nothing(net: Net) -> AbstractContextManager[Attached]:
    return nullcontext(Attached())


def on_cpu(net: Net) -> AbstractContextManager[Attached]:
    return nullcontext(Attached(lambda: save_on_cpu(pin_memory=ON_DEVICE)))


@contextmanager
def checkpointed_blocks(net: Net) -> Iterator[Attached]:
    blocks = [module for module in net.model.modules() if isinstance(module, BLOCKS)]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    yield Attached()
    for block in blocks:
        del block.forward


class SelfDeletingFile:
    """As in torch's tutorial on hooks for saved tensors."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __del__(self) -> None:
        Path(self.name).unlink()


@contextmanager
def one_file_each(net: Net) -> Iterator[Attached]:
    with tempfile.TemporaryDirectory() as folder:

        def pack(tensor: Tensor) -> SelfDeletingFile:
            file = SelfDeletingFile(str(Path(folder) / str(uuid4())))
            torch.save(tensor, file.name)
            return file

        def cached() -> int:
            return sum(cached_bytes(path) for path in Path(folder).iterdir())

        yield Attached(lambda: saved_tensors_hooks(pack, lambda file: torch.load(file.name)), cached=cached)


# ---- ours -----------------------------------------------------------------------------------------------------


def kept(make: Callable[[], Policies]) -> Contender:
    @contextmanager
    def attach(net: Net) -> Iterator[Attached]:
        policy = make()
        with keep_saved(net.model, policy):
            if isinstance(policy, Disk):
                yield Attached(settle=policy.flush, cached=lambda: cached_bytes(spill_path(policy)))
            else:
                yield Attached()

    return attach


def spill_path(disk: Disk) -> Path:
    """The file without a name, as this process sees it."""
    spill = disk._spill
    return Path("/proc/self/fd") / str(spill.file._descriptor if spill else -1)


PLANNED = {f"**budget {share:.0%}**": Planned(share) for share in (0.5, 0.25, 0.15)}
"""Each is measured once, and keeps its plan for all rounds."""

CONTENDERS: dict[str, Contender] = {
    "nothing (the noise)": nothing,
    "save_on_cpu": on_cpu,
    "torch.utils.checkpoint, each block": checkpointed_blocks,
    "one file for each tensor": one_file_each,
    "**keep**": kept(Keep),
    "**disk**": kept(Disk),
    "**lossless**": kept(Lossless),
    "**bf16**": kept(Bfloat16),
    "**8 bits**": kept(EightBit),
    "**recompute, each block**": kept(lambda: {lambda candidate: isinstance(candidate.module, BLOCKS): Recompute()}),
}
if ON_DEVICE:
    CONTENDERS["**cpu**"] = kept(Cpu)
CONTENDERS |= {name: kept(partial(PLANNED.__getitem__, name)) for name in PLANNED}


# ---- memory ---------------------------------------------------------------------------------------------------


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache, by ``mincore``; 0 where that cannot be asked."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return 0
    length, libc = os.fstat(descriptor).st_size, ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    pages = (ctypes.c_ubyte * (-(-length // 4096)))()
    address = libc.mmap(None, ctypes.c_size_t(length), 1, 1, descriptor, ctypes.c_long(0)) if length else None
    if address:
        libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), pages)
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))
    os.close(descriptor)
    return 4096 * sum(page & 1 for page in pages)


def held_bytes() -> int:
    if ON_DEVICE:
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def forget_peak() -> None:
    if ON_DEVICE:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    if ON_DEVICE:
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


class Memory(NamedTuple):
    """Bytes beyond those before the step: after the forward, with the page cache, and at the peak of the step."""

    after_forward: int
    peak: int


def measure_memory(contender: Contender, net: Net, mixed: bool) -> Memory:
    with contender(net) as attached:
        run_step(net, attached, mixed)
        gc.collect()
        net.model.zero_grad(set_to_none=True)
        before = held_bytes()
        forget_peak()
        with attached.around(), autocast(mixed):
            loss = net.loss(net.model(net.inputs))
        attached.settle()
        after_forward = held_bytes() - before + attached.cached()
        loss.backward()
        return Memory(after_forward, peak_bytes() - before)


# ---- time -----------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Seconds a step, and CPU seconds of all threads."""

    wall: float
    cpu: float


@dataclass
class Measures:
    """One contender: its ratios to bare steps, one a round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, cost: Cost, before: Cost, after: Cost) -> None:
        self.wall.append(2 * cost.wall / (before.wall + after.wall))
        self.cpu.append(2 * cost.cpu / (before.cpu + after.cpu))


def autocast(mixed: bool) -> AbstractContextManager[Any]:
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=mixed)


def run_step(net: Net, attached: Attached, mixed: bool) -> None:
    net.model.zero_grad(set_to_none=True)
    with attached.around(), autocast(mixed):
        loss = net.loss(net.model(net.inputs))
    loss.backward()


def time_contender(contender: Contender, net: Net, steps: int, mixed: bool) -> Cost:
    with contender(net) as attached:
        run_step(net, attached, mixed)
        synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            run_step(net, attached, mixed)
        synchronize()
        return Cost((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps)


def synchronize() -> None:
    if ON_DEVICE:
        torch.cuda.synchronize()


def measure_times(
    contenders: dict[str, Contender], net: Net, rounds: int, steps: int, mixed: bool
) -> dict[str, Measures]:
    measures = {name: Measures() for name in contenders}
    names = list(contenders)
    for number in range(rounds):
        before = time_contender(nothing, net, steps, mixed)
        start = number % len(names)
        for name in names[start:] + names[:start]:
            show(f"round {number + 1} of {rounds}: {name}")
            cost = time_contender(contenders[name], net, steps, mixed)
            after = time_contender(nothing, net, steps, mixed)
            measures[name].add(cost, before, after)
            before = after
    show("")
    return measures


# ---- the table ------------------------------------------------------------------------------------------------


def spread(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return f"{middle:.2f} [{low:.2f} {high:.2f}]"


def machine() -> str:
    device = torch.cuda.get_device_name() if ON_DEVICE else f"{os.cpu_count()} CPUs, {torch.get_num_threads()} thread"
    return f"{platform.system()} {platform.machine()}, {device}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="steps of a contender in a round")
    parser.add_argument("--net", choices=NETS, default="resnet152" if ON_DEVICE else "resnet50")
    parser.add_argument("--mixed", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--only", default="", help="contenders whose name contains this text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = NETS[arguments.net]()
    net.to(DEVICE, torch.channels_last if arguments.channels_last else torch.preserve_format)
    contenders = {name: one for name, one in CONTENDERS.items() if arguments.only in name}
    print(f"{machine()}; {arguments.net}{', mixed' * arguments.mixed}{', channels_last' * arguments.channels_last}")
    memory = {}
    for name, contender in contenders.items():
        show(f"memory: {name}")
        memory[name] = measure_memory(contender, net, arguments.mixed)
    measures = measure_times(contenders, net, arguments.rounds, arguments.steps, arguments.mixed)
    print("| | held after the forward, MB | peak, MB | CPU time | wall time |\n|---|---:|---:|---:|---:|")
    for name, measured in measures.items():
        held = " | ".join(f"{nbytes / 1e6:,.0f}" for nbytes in memory[name])
        print(f"| {name} | {held} | {spread(measured.cpu)} | {spread(measured.wall)} |")
    for name, policy in PLANNED.items():
        if name in measures and policy.plan is not None:
            print(f"\n{name.strip('*')}: {str(policy.plan).splitlines()[0]}")


if __name__ == "__main__":
    main()
