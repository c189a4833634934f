"""What recording costs inside compiled code: CPU time a step beside the bare compiled step, and CPU time to compile.

    python benchmarks/compiled.py [--nets gpt2 mlp] [--backend inductor] [--rounds 15] [--seconds 0.3]

Each contender compiles a net of its own, once; then all are measured in turns (see ``timing.py``). Forward and backward
alone are timed. Inductor writes C++ and needs a compiler; its children's time counts as compile time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import retrograd as rg
from nets import Net, make_gpt2, make_mlp
from timing import interleave

NETS: dict[str, Callable[[], Net]] = {
    "gpt2": partial(make_gpt2, layers=2, vocabulary=2048),
    "mlp": lambda: make_mlp(width=256, batch=64),
}

Record = Callable[[nn.Module], AbstractContextManager[Any]]


def set_disabled_hooks(model: nn.Module) -> None:
    """Hooks that the compiler is told to leave alone: each breaks the graph. Two statistics, no histogram."""
    seen: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}

    def note(name: str, kind: str, tensor: torch.Tensor) -> None:
        seen[name, kind] = tensor.mean(), tensor.square().mean()

    def make(name: str) -> Callable[..., None]:
        @torch.compiler.disable
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            note(name, "output", output.detach())
            if output.requires_grad:
                output.register_hook(partial(note, name, "grad"))

        return hook

    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(make(name))


@dataclass
class Contender:
    """How a model is recorded.

    Attributes:
        record: begins a recording, before it is compiled and again for each measurement.
        prepare: what is done to the model once.
    """

    record: Record
    prepare: Callable[[nn.Module], None] = lambda model: None


CONTENDERS = {
    "bare": Contender(lambda model: nullcontext()),
    "attached, never scheduled": Contender(partial(rg.record, schedule=lambda step: False)),
    "recorded, no histogram": Contender(partial(rg.record, histogram=False)),
    "recorded": Contender(rg.record),
    "recorded at the boundary": Contender(partial(rg.record, sites=["self:*", "*:weight*", "*:bias*"])),
    "disabled hooks": Contender(lambda model: nullcontext(), set_disabled_hooks),
}


@dataclass
class Compiled:
    """A net that was compiled while one contender recorded it.

    Attributes:
        step: forward and backward.
        record: begins the contender's recording anew, for which nothing is compiled anew.
        compile_seconds: CPU time of the first step, all threads and children.
        graphs, breaks: how many.
    """

    step: Callable[[], None]
    record: Callable[[], AbstractContextManager[Any]]
    compile_seconds: float
    graphs: int
    breaks: int

    def measure(self, seconds: float) -> float:
        """CPU seconds a step."""
        with self.record():
            self.step()
            count, begin, deadline = 0, time.process_time(), time.perf_counter() + seconds
            while count < 2 or time.perf_counter() < deadline:
                self.step()
                count += 1
            return (time.process_time() - begin) / count


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def compile_net(make_net: Callable[[], Net], contender: Contender, backend: str) -> Compiled:
    """Compile a new net while a contender records it."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    net = make_net()
    contender.prepare(net.model)
    parameters = list(net.model.parameters())
    call = torch.compile(net.model, backend=backend)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        net.loss(call(net.inputs)).backward()

    with contender.record(net.model):
        begin = cpu_seconds()
        step()
        took = cpu_seconds() - begin
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return Compiled(step, partial(contender.record, net.model), took, graphs, breaks)


def measure_net(name: str, backend: str, names: list[str], rounds: int, seconds: float) -> None:
    """Print a line for each contender."""
    made = {each: compile_net(NETS[name], CONTENDERS[each], backend) for each in ["bare", *names]}
    ratios: dict[str, list[float]] = {each: [] for each in names}
    base = made["bare"]
    bare = partial(base.measure, seconds)
    for turn in interleave(names, rounds, lambda each: made[each].measure(seconds), bare):
        ratios[turn.name].append(2 * turn.found / (turn.before + turn.after))
    print(f"{name}, {backend}: bare step {1e3 * bare():.2f} ms, compiled in {base.compile_seconds:.1f} s")
    for each, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else 3 * found
        one = made[each]
        longer = one.compile_seconds / base.compile_seconds
        print(
            f"  {each:28} {middle:.3f} [{low:.3f} {high:.3f}]  compile x{longer:.2f}"
            f"  graphs {one.graphs} ({base.graphs})  breaks {one.breaks} ({base.breaks})"
        )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS)[1:], default=list(CONTENDERS)[1:])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    compile_net(lambda: make_mlp(width=8, batch=2, layers=2), CONTENDERS["bare"], options.backend)  # loads the compiler
    for name in options.nets:
        measure_net(name, options.backend, options.contenders, options.rounds, options.seconds)


if __name__ == "__main__":
    main()
