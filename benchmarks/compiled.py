"""What recording and rewriting cost inside compiled code: CPU time a step, and to compile, beside the bare net.

    python benchmarks/compiled.py [--nets gpt2 mlp] [--backends inductor aot_eager] [--only TEXT] [--rounds 7]

Each row compiles a net of its own, once, and is then measured in turns with a bare one (see ``timing.py``); rows of one
group share a graph, and only the first of them shows what compiling takes. Timed are forward, backward and the update
of one small parameter: without it all would be a recording's first step, which reads gradients of parameters too.
Inductor writes C++ and needs a compiler; its children's time counts as compile time, and its caches are off.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import retrograd as rg
from contenders import OUTPUTS
from nets import Net, make_gpt2, make_mlp
from timing import interleave, keep_freed_memory, make_plain_parser, say

NETS: dict[str, Callable[[], Net]] = {
    "gpt2": partial(make_gpt2, layers=2, vocabulary=2048),
    "mlp": lambda: make_mlp(width=256, batch=64),
}

WARM_STEPS, LEAST_STEPS, MOST_STEPS = 17, 4, 14
"""Steps of a recording before any is measured; measured, at least and at most. The next that it looks at for facts, as
later at one of 128, is step 32."""

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


SUMS, COLUMNS = 6, 8
"""Columns of a traced row that are added up, and all; the others hold maxima."""


def merge_traced(row: Tensor, tensor: Tensor, on: Tensor) -> None:
    """Merge eight statistics of a tensor into its row, by operations that the compiler sees. Nothing where on is 0."""
    seen = tensor.detach().float()
    sums = [seen.sum(), seen.square().sum(), seen.abs().sum(), (seen == 0).sum(), (~seen.isfinite()).sum()]
    merged = row[:SUMS] + on * torch.stack([*(each.float() for each in sums), torch.ones_like(sums[0])])
    largest = torch.where(on > 0, torch.stack([seen.amax(), -seen.amin()]), row[SUMS:])
    row.copy_(torch.cat([merged, torch.maximum(row[SUMS:], largest)]))


class TracedStatistics(torch.autograd.Function):
    """Statistics of a tensor and of its gradient, in rows of a slab."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, row: Tensor, gradient_row: Tensor, on: Tensor) -> Tensor:
        """The same tensor."""
        ctx.gradient_row, ctx.on = gradient_row, on
        merge_traced(row, tensor, on)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The same gradient."""
        merge_traced(ctx.gradient_row, gradient, ctx.on)
        return gradient, None, None, None


class TracedScale(torch.autograd.Function):
    """Half of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """The same tensor."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Its gradient."""
        return 0.5 * gradient


TRACED_ON = torch.ones(())
"""The multiplier that switches traced statistics: on the device, so that nothing is compiled anew."""


def set_traced_hooks(model: nn.Module) -> None:
    """Hooks of which the compiler makes a part of its kernels."""

    def make(row: Tensor, gradient_row: Tensor) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return TracedStatistics.apply(output, row, gradient_row, TRACED_ON)  # type: ignore[no-untyped-call]

        return hook

    for module in leaf_modules(model):
        module.register_forward_hook(make(torch.zeros(COLUMNS), torch.zeros(COLUMNS)))


def set_scaling_hooks(model: nn.Module) -> None:
    """The rule of the benchmark as a hook that the compiler traces."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return TracedScale.apply(output)  # type: ignore[no-untyped-call]

    for module in leaf_modules(model):
        module.register_forward_hook(hook)


def leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules without others in them."""
    return [module for module in model.modules() if not list(module.children())]


def rewrite(model: nn.Module) -> AbstractContextManager[Any]:
    """Half of each gradient, by a rule."""
    names = [name for name, module in model.named_modules() if not list(module.children())]
    return rg.rewrite(model, {f"{name}:output.grad": rg.rules.Scale(0.5) for name in names})


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Traced statistics do nothing."""
    TRACED_ON.zero_()
    try:
        yield
    finally:
        TRACED_ON.fill_(1)


@dataclass
class Group:
    """Rows that share a graph.

    Attributes:
        rows: how a model is recorded in each; the first is on while it is compiled.
        prepare: what is done to the model once.
    """

    rows: dict[str, Record]
    prepare: Callable[[nn.Module], None] = lambda model: None


def do_nothing(model: nn.Module) -> AbstractContextManager[Any]:
    """Record nothing."""
    return nullcontext()


GROUPS = [
    Group({"bare, a net of its own": do_nothing}),
    Group(
        {
            "recorded: statistics, histogram": partial(rg.record, sites=OUTPUTS),
            "recorded: statistics": partial(rg.record, sites=OUTPUTS, histogram=False),
            "recorded: not scheduled": partial(rg.record, sites=OUTPUTS, schedule=lambda step: False),
            "recorded: gradients of parameters, too": rg.record,
        }
    ),
    Group(
        {"statistics traced into the graph, by hand": do_nothing, "the same, switched off": switched_off},
        set_traced_hooks,
    ),
    Group({"recorded at the boundary": partial(rg.record, sites=["self:*", "*:weight*", "*:bias*"])}),
    Group({"disabled hooks, two statistics": do_nothing}, set_disabled_hooks),
    Group({"a rule on each gradient": rewrite}),
    Group({"the same rule traced, by hand": do_nothing}, set_scaling_hooks),
]


@dataclass
class Compiled:
    """A net that was compiled once.

    Attributes:
        model: it.
        step: forward, backward and the update of one small parameter.
        compile_seconds: CPU time of the first step, all threads and children.
        graphs, breaks: how many.
    """

    model: nn.Module
    step: Callable[[], None]
    compile_seconds: float = 0.0
    graphs: int = 0
    breaks: int = 0

    def measure(self, record: Record, seconds: float) -> float:
        """CPU seconds a step, while it is recorded so, for which nothing is compiled anew."""
        with record(self.model):
            for _ in range(1 if record is do_nothing else WARM_STEPS):
                self.step()
            count, begin, deadline = 0, time.process_time(), time.perf_counter() + seconds
            while count < LEAST_STEPS or (count < MOST_STEPS and time.perf_counter() < deadline):
                self.step()
                count += 1
            return (time.process_time() - begin) / count


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def compile_net(
    make_net: Callable[[], Net], record: Record, prepare: Callable[[nn.Module], None], backend: str
) -> Compiled:
    """Compile a new net while it is recorded; of a class of its own, or it might run the graph of another."""
    counters.clear()
    torch.manual_seed(0)
    net = make_net()
    net.model.__class__ = type("Net", (type(net.model),), {})
    prepare(net.model)
    model = net.model
    net.model = torch.compile(model, backend=backend)  # type: ignore[assignment]
    made = Compiled(model, net.step)
    with record(model):
        begin = cpu_seconds()
        made.step()
        made.compile_seconds = cpu_seconds() - begin
    made.graphs, made.breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return made


def measure_group(group: Group, make_net: Callable[[], Net], backend: str, base: Compiled, options: Any) -> None:
    """Print a line for each row of a group that was asked for, as soon as it is measured."""
    rows = {name: record for name, record in group.rows.items() if any(text in name for text in options.only)}
    if not rows:
        return
    made = compile_net(make_net, next(iter(group.rows.values())), group.prepare, backend)
    longer = made.compile_seconds / base.compile_seconds
    for name, record in rows.items():
        measure_bare = partial(base.measure, do_nothing, options.seconds)
        measure = partial(made.measure, record, options.seconds)
        turns = interleave([name], options.rounds, lambda _, measure=measure: measure(), measure_bare)
        found = [2 * turn.found / (turn.before + turn.after) for turn in turns]
        low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else 3 * found
        if options.markdown:
            graphs, breaks = f"{made.graphs} ({base.graphs})", f"{made.breaks} ({base.breaks})"
            say(f"| {name} | {middle:.3f} | {longer:.2f} | {graphs} | {breaks} |")
            continue
        say(
            f"  {name:42} {middle:.3f} [{low:.3f} {high:.3f}]  compile x{longer:.2f}"
            f"  graphs {made.graphs} ({base.graphs})  breaks {made.breaks} ({base.breaks})"
        )


def measure_net(name: str, backend: str, options: Any) -> None:
    """Measure all groups on a net."""
    torch._dynamo.reset()
    base = compile_net(NETS[name], do_nothing, lambda model: None, backend)
    bare = base.measure(do_nothing, options.seconds)
    say(f"{name}, {backend}: bare step {1e3 * bare:.2f} ms, compiled in {base.compile_seconds:.1f} s")
    if options.markdown:
        say("\n| | a step | compiling | graphs (bare) | breaks (bare) |\n|---|---:|---:|---:|---:|")
    for group in GROUPS:
        measure_group(group, NETS[name], backend, base, options)


def main() -> None:
    """Measure."""
    parser = make_plain_parser(__doc__ or "", NETS)
    keep_freed_memory()
    parser.set_defaults(rounds=7)
    parser.add_argument("--backends", nargs="+", default=["inductor", "aot_eager"])
    parser.add_argument("--seconds", type=float, default=0.2, help="length of one measurement")
    options = parser.parse_args()
    torch._inductor.config.force_disable_caches = True
    torch._dynamo.config.recompile_limit = 64  # one code for all nets
    for backend in options.backends:  # loads the compiler
        compile_net(lambda: make_mlp(width=8, batch=2, layers=2), rg.record, lambda model: None, backend)
        for name in options.nets:
            measure_net(name, backend, options)


if __name__ == "__main__":
    main()
