"""A compiled model is recorded as an eager one is, and is compiled as often as without us."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from shutil import which
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import retrograd as rg
from tests.compiling import count_compiled
from tests.scenarios import Trial, bits, build, train

STEPS = 3

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(x))


class Net(nn.Module):
    def __init__(self, *, broken: bool = False, saved: bool = False) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(6))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.broken = broken
        self.saved = saved

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x + self.token
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.saved else block(x)
            if self.broken and number == 1:
                torch._dynamo.graph_break()
        return {"hidden": x, "logits": self.norm(x)}


def run(
    compile_: Callable[[Net, str], tuple[nn.Module, Callable[..., Any]]],
    backend: str,
    *,
    record: bool,
    net: dict[str, bool] | None = None,
    sites: Any = "*",
    warm: bool = False,
) -> tuple[Any, dict[str, Any], Any]:
    """Train; what came out of it, what was compiled, and what was recorded."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(5)
    model = Net(**(net or {}))
    recorded, call = compile_(model, backend)
    update = torch.optim.AdamW(model.parameters(), lr=0.05)

    def step(number: int) -> Tensor:
        update.zero_grad()
        loss = call(torch.randn(4, 6))["logits"].square().mean()
        loss.backward()
        update.step()
        return loss

    def evaluate() -> Any:
        with torch.no_grad():
            return call(torch.ones(2, 6))

    trial = Trial(model, step, evaluate, (update,))
    if warm:
        trial.step(0)
    with rg.record(recorded, sites=sites) if record else nullcontext() as recording:
        seen = train(trial, STEPS)
    if compile_ is not recorded_as_it_was:  # its inner hooks went away, so it would be compiled anew
        seen += bits("once more", [trial.step(STEPS)])
    return seen, count_compiled(), recording and recording.history


def whole(net: Net, backend: str) -> tuple[nn.Module, Callable[..., Any]]:
    compiled = torch.compile(net, backend=backend)
    return compiled, compiled


def as_one_graph(net: Net, backend: str) -> tuple[nn.Module, Callable[..., Any]]:
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    return compiled, compiled


def recorded_as_it_was(net: Net, backend: str) -> tuple[nn.Module, Callable[..., Any]]:
    return net, torch.compile(net, backend=backend)


def in_place(net: Net, backend: str) -> tuple[nn.Module, Callable[..., Any]]:
    net.compile(backend=backend, fullgraph=not net.broken)
    return net, net


def regions(net: Net, backend: str) -> tuple[nn.Module, Callable[..., Any]]:
    for block in net.blocks:
        block.compile(backend=backend)
    return net, net


def wrapped_part(net: Net, backend: str) -> tuple[nn.Module, Callable[..., Any]]:
    net.blocks[1] = torch.compile(net.blocks[1], backend=backend)
    return net, net


WAYS = [whole, as_one_graph, recorded_as_it_was, in_place, regions, wrapped_part]


@pytest.mark.parametrize(
    ("way", "backend"), [*((way, "aot_eager") for way in WAYS), (whole, "eager"), (regions, "eager")]
)
def test_the_same_bits_graphs_and_breaks(way: Any, backend: str) -> None:
    bare, compiled_bare, _ = run(way, backend, record=False)
    seen, compiled, _ = run(way, backend, record=True)
    assert seen == bare
    assert compiled == compiled_bare
    assert compiled["stats"]["unique_graphs"] >= 1


@pytest.mark.parametrize("net", [{"broken": True}, {"saved": True}], ids=["graph break", "checkpoints"])
@pytest.mark.parametrize("way", [whole, in_place])
def test_with_graph_breaks_and_checkpoints(way: Any, net: dict[str, bool]) -> None:
    bare, compiled_bare, _ = run(way, "aot_eager", record=False, net=net)
    seen, compiled, _ = run(way, "aot_eager", record=True, net=net)
    assert seen == bare
    if "broken" in net:  # torch compiles modules that have hooks one by one where it has given up on what calls them
        compiled_bare["stats"] = compiled["stats"]
        compiled_bare["frames"] = compiled["frames"]
    assert compiled == compiled_bare


@pytest.mark.parametrize(
    ("way", "warm"),
    [(whole, False), (whole, True), (as_one_graph, False), (recorded_as_it_was, True), (in_place, True)],
)
def test_the_boundary_is_recorded(way: Any, warm: bool) -> None:
    """Also when the recording begins after the first compiled call."""
    _, _, plain = run(lambda net, _: (net, net), "eager", record=True, warm=warm)
    _, _, history = run(way, "eager", record=True, warm=warm)
    for name in ("input.x", "output.logits", "output.hidden", "output.logits.grad", "token.grad", "token.update"):
        site = f"self:{name}"
        assert history[site].steps.tolist() == [0, 1, 2], site
        assert history[site].rms.tolist() == plain[site].rms.tolist(), site
    assert history["blocks.1.linear:weight.grad"].rms.tolist() == plain["blocks.1.linear:weight.grad"].rms.tolist()
    if not warm:  # of what was compiled before, torch 2.11 compiles some anew, and later ones nothing
        assert history["blocks.1:output"].steps.tolist() == [0, 1, 2]


@pytest.mark.parametrize("way", [whole, in_place, regions])
def test_a_model_that_was_compiled_before_is_told_of(way: Any) -> None:
    model = Net()
    recorded, call = way(model, "aot_eager")
    call(torch.ones(2, 6))["logits"].sum().backward()
    with pytest.warns(UserWarning, match=r"torch\.compiler\.reset\(\)"), rg.record(recorded):
        torch._dynamo.reset()
        call(torch.ones(2, 6))["logits"].sum().backward()
    with rg.record(recorded) as recording:  # the taps are in the graph by now
        call(torch.ones(2, 6))["logits"].sum().backward()
    assert recording.history["blocks.1.act:output.grad"].steps.tolist() == [0]


@pytest.mark.parametrize("what", ["model", "loss", "step", "optimizer too"])
def test_a_function_that_was_compiled_before_is_told_of(what: str) -> None:
    """Its calls pass all hooks, so the warning comes with the first gradients; and no second time."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager")

    def evaluate() -> Tensor:
        called = compiled if what == "model" else model
        return called(torch.ones(3, 6)).square().mean()

    def advance() -> None:
        forward().backward()

    def step() -> None:
        update.zero_grad()
        advance()
        update.step()

    forward = torch.compile(evaluate, backend="aot_eager") if what == "loss" else evaluate
    if what == "step":
        advance = torch.compile(advance, backend="aot_eager")
    elif what == "optimizer too":
        step = torch.compile(step, backend="aot_eager")
    step()
    with (
        pytest.warns(UserWarning, match=r"runs 0, 1. Call torch\.compiler\.reset\(\)") as told,
        rg.record(model) as late,
    ):
        step()
        step()
    assert len([each for each in told if "compiler.reset" in str(each.message)]) == 1
    assert "0:output" not in late.history.sites
    torch.compiler.reset()
    with rg.record(model) as recording:
        step()
    assert recording.history["0:output.grad"].steps.tolist() == [0]


def test_what_is_not_called_is_not_taken_for_compiled() -> None:
    """Weights that are used without their module, beside compiled code that has nothing to do with them."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(2))
    with warnings.catch_warnings(), rg.record(model, sites="1:output"):
        warnings.simplefilter("error")
        model[1](nn.functional.linear(torch.ones(2, 6), model[0].weight)).sum().backward()


def recorded_rows(history: Any) -> dict[str, list[Any]]:
    """All that was recorded."""
    statistics = ("count", "mean", "rms", "min", "max", "zeros")
    return {
        name: [history[name].steps.tolist(), *(getattr(history[name], each).tolist() for each in statistics)]
        for name in history.sites
    }


@pytest.mark.parametrize("net", [{}, {"saved": True}, {"broken": True}], ids=["plain", "checkpoints", "graph break"])
@pytest.mark.parametrize(
    ("way", "sites"),
    [
        *(pytest.param(way, "*", id=f"{way.__name__}-all") for way in WAYS),
        pytest.param(whole, None, id="whole-default"),  # are among all of them
        *(pytest.param(way, None, id=f"{way.__name__}-default", marks=pytest.mark.thorough) for way in WAYS[1:]),
    ],
)
def test_what_is_recorded_inside_is_what_eager_records(way: Any, net: dict[str, bool], sites: Any) -> None:
    if way is as_one_graph and "broken" in net:
        pytest.skip("a break is an error there")
    _, _, plain = run(lambda net, _: (net, net), "eager", record=True, net=net, sites=sites)
    _, _, history = run(way, "aot_eager", record=True, net=net, sites=sites)
    assert recorded_rows(history) == recorded_rows(plain)


def keep_products(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operation in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, keep_products),
    },
}


class Checkpointed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, **CHECKPOINTS[self.kind])
        return x


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("part", ["whole", "blocks"])
def test_what_is_computed_again_counts_once(kind: str, part: str) -> None:
    def train_it(compiled: str) -> Any:
        torch.manual_seed(5)
        model = Checkpointed(kind)
        for block in model.blocks if compiled == "blocks" else ():
            block.compile(backend="aot_eager")
        call = torch.compile(model, backend="aot_eager") if compiled == "whole" else model
        with rg.record(model) as recording:
            for _ in range(2):
                call(torch.randn(4, 6, requires_grad=True)).square().mean().backward()
        return recorded_rows(recording.history)

    assert train_it(part) == train_it("nothing")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_kept_tensors_and_statistics_of_users(backend: str) -> None:
    if backend == "inductor" and which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler")

    @rg.statistic(merge="max")
    def spread(tensor: Tensor) -> Tensor:
        return tensor.max() - tensor.min()

    def train_it(*, compiled: bool) -> Any:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))
        call = torch.compile(model, backend=backend) if compiled else model
        keep = [
            rg.Keep("0:output", copy=True),
            rg.Keep("1:output.grad", last=2, when=rg.on_nonfinite(), copy=True),
        ]
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        with rg.record(model, schedule=2, tensors=keep, statistics=[spread]) as recording:
            for step in range(5):
                loss = call(torch.randn(4, 6)).square().mean()
                (loss * float("nan") if step == 4 else loss).backward()
                update.step()
                update.zero_grad()
        history = recording.history
        kept = {
            name: [(each.step, each.tensor) for each in history[name].tensors] for name in ("0:output", "1:output.grad")
        }
        spreads = {name: history[name].statistic("spread") for name in history.sites if ":output" in name}
        return kept, spreads

    kept, spreads = train_it(compiled=True)
    kept_before, spreads_before = train_it(compiled=False)
    assert [step for step, _ in kept["0:output"]] == [0, 2, 4]
    assert kept["1:output.grad"]
    torch.testing.assert_close(kept, kept_before, equal_nan=True)
    assert spreads.keys() == spreads_before.keys()
    for name in spreads:
        torch.testing.assert_close(spreads[name], spreads_before[name], equal_nan=True)


@pytest.mark.parametrize("way", [regions, wrapped_part])
def test_boundaries_within_a_model(way: Any) -> None:
    _, _, plain = run(lambda net, _: (net, net), "eager", record=True)
    _, _, history = run(way, "eager", record=True)
    for site in (
        "blocks.1.linear:input.input",
        "blocks.1.linear:input.input.grad",
        "blocks.1:input.x",
        "blocks.1:input.x.grad",
        "blocks.1:output",
        "blocks.1:output.grad",
        "norm:output.grad",
    ):
        assert history[site].rms.tolist() == plain[site].rms.tolist(), site
    assert "blocks.1.linear:output" in history.sites


def test_a_type_selects_the_module_inside_the_wrapper() -> None:
    _, _, history = run(whole, "eager", record=True, sites=Net)
    assert "self:output.logits" in history.sites


def train_compiled(*, record: bool) -> tuple[Any, dict[str, Any]]:
    """A whole step is compiled, so autograd's engine and its hooks run under the compiler's eye."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(5)
    model = nn.Sequential(Net(), nn.Identity())
    update = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        loss = rg.watch("scaled", model(x)["logits"] * 2).square().mean()
        scaler.scale(loss).backward()
        return loss * 2

    losses = []
    with rg.record(model, sites="*") if record else nullcontext() as recording:
        for _ in range(STEPS):
            losses.append(step(torch.randn(4, 6)))
            scaler.step(update)
            scaler.update()
            update.zero_grad()
    if recording is not None:
        assert not [event for event in recording.history.events if event.kind == "fault"]
        assert recording.history["0:token.grad"].steps.tolist() == [0, 1, 2]
    counted = count_compiled()
    return bits("losses", losses), counted | {"graph_break": sum(counted["graph_break"].values())}


def test_a_step_that_is_compiled_as_a_whole() -> None:
    assert train_compiled(record=True) == train_compiled(record=False)


def train_with_compiled_autograd(*, record: bool) -> tuple[Any, dict[str, Any]]:
    """The backward pass is one graph, hooks and all."""
    torch._dynamo.reset()
    counters.clear()
    run = build("residual_convolutions")
    compiled_backward = compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True))
    with rg.record(run.models, sites="*") if record else nullcontext() as recording, compiled_backward:
        losses = [run.train_step(number) for number in range(2)]
    if recording is not None:
        assert not [site for site in recording.history.sites if len(recording.history[site].steps)]
    return bits("", [losses, list(run.modules[""].parameters())]), dict(counters["stats"])


def test_compiled_autograd_is_not_disturbed() -> None:
    """Nothing is recorded of steps whose backward pass runs as one graph."""
    assert train_with_compiled_autograd(record=True) == train_with_compiled_autograd(record=False)


# ---- what may differ from step to step ------------------------------------------------------------------------------


class Shared(nn.Module):
    """A module that is called twice, one that is frozen, nested outputs, and an output that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.twice = nn.Linear(6, 6)
        self.fork = Fork()

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.frozen(x)).tanh())
        left, rest = self.fork(x)
        return left + rest["b"]


class Fork(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.sin(), {"a": x.cos(), "b": x.exp(), "n": x.argmax()}


def train_shared(
    compile_: Callable[[nn.Module], Any],
    *,
    batches: tuple[int, ...] = (4, 4, 4),
    autocast: bool = False,
    **choices: Any,
) -> tuple[Any, dict[str, Any], Any]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(5)
    model = Shared()
    call = compile_(model)
    losses = []
    with rg.record(model, **choices) as recording:
        for size in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = call(torch.randn(size, 6)).square().mean()
            loss.backward()
            losses.append(loss)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    with torch.no_grad():
                        parameter -= 0.01 * parameter.grad
                    parameter.grad = None
        with torch.inference_mode():
            losses.append(call(torch.ones(batches[0], 6)))
    return bits("", losses), recorded_rows(recording.history), count_compiled()


def as_fullgraph(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(
    "how",
    [{}, {"schedule": 2}, {"batches": (4, 5, 6)}, {"tensors": "fork*"}],
    ids=["plain", "schedule", "shapes", "kept"],
)
def test_calls_shapes_and_outputs(how: dict[str, Any]) -> None:
    seen, expected, _ = train_shared(lambda model: model, **how)
    found_bits, found, _ = train_shared(as_fullgraph, **how)
    assert found == expected
    assert found_bits == seen


def test_under_autocast() -> None:
    """Of weights, which are cast once for two calls by eager code alone, the gradient differs without us too."""
    sites = ["*:output*"]
    _, expected, _ = train_shared(lambda model: model, autocast=True, batches=(4,), sites=sites)
    _, found, _ = train_shared(as_fullgraph, autocast=True, batches=(4,), sites=sites)
    assert found == expected


def test_nothing_is_compiled_anew_when_the_recording_changes() -> None:
    torch.manual_seed(5)
    model = Shared()
    call = as_fullgraph(model)
    x = torch.randn(4, 6)

    def run() -> None:
        call(x).sum().backward()

    with rg.record(model):
        run()
    first = count_compiled()
    run()
    with rg.record(model, sites="twice*", schedule=2) as second, rg.record(model, tensors="fork*"):
        for _ in range(3):
            run()
    assert {site.partition(":")[0].partition("#")[0] for site in second.history.sites} == {"twice"}
    run()
    assert count_compiled() == first


def test_a_gradient_that_comes_twice_and_one_that_comes_late() -> None:
    """Over a retained graph, and after the recording has ended."""
    model = Shared()
    call = as_fullgraph(model)
    x = torch.randn(4, 6)
    with rg.record(model) as recording:
        loss = call(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        late = call(x).sum()
    late.backward()
    name = "fork:output.0.grad"
    assert len(recording.history[name].rms) >= 1
    assert model.twice.weight.grad is not None


class Wide(nn.Module):
    """Tensors that are large enough to be remembered once read, in memory that inductor uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.acts = nn.ModuleList(nn.Tanh() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer, act in zip(self.layers, self.acts, strict=True):
            x = act(layer(x))
        return x


def train_wide(compile_: Callable[[nn.Module], Any], *, record: bool) -> tuple[Any, Any, dict[str, Any]]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(5)
    model = Wide()
    call = compile_(model)
    with rg.record(model, tensors="acts.1*") if record else nullcontext() as recording:
        for _ in range(2):
            call(torch.randn(128, 64)).square().mean().backward()
    seen = bits("", list(model.parameters()) + [parameter.grad for parameter in model.parameters()])
    return seen, recording and recording.history, count_compiled()


@pytest.mark.skipif(which("g++") is None, reason="inductor needs a C++ compiler")
def test_with_inductor() -> None:
    """The same bits as without us; the numbers and the kept tensors of eager code, but for the compiler's rounding."""

    def compile_(model: nn.Module) -> Any:
        return torch.compile(model, fullgraph=True)

    bare, _, counted_bare = train_wide(compile_, record=False)
    seen, history, counted = train_wide(compile_, record=True)
    assert seen == bare
    assert counted == counted_bare
    _, plain, _ = train_wide(lambda model: model, record=True)
    assert history.sites == plain.sites
    for name in plain.sites:
        for statistic in ("mean", "rms", "min", "max"):
            found, expected = getattr(history[name], statistic), getattr(plain[name], statistic)
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-6, msg=name)
    for name in ("acts.1:output", "acts.1:output.grad"):
        for found, expected in zip(history[name].tensors, plain[name].tensors, strict=True):
            torch.testing.assert_close(found.tensor, expected.tensor, rtol=1e-3, atol=1e-6, msg=name)


class Overwriting(nn.Module):
    """Each value that is recorded is written into before the kernel that it is in ends, or its memory is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.see, self.act = nn.Identity(), nn.ReLU(inplace=True)
        self.register_buffer("count", torch.zeros(8))
        self.register_buffer("before", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        counted = self.see(self.count)
        self.count.add_(x.sum(0))
        counted = counted * self.see(self.count)
        kept = self.see(self.before) * 2
        hidden = self.norm(self.first(x))
        kept = kept + self.see(hidden)
        self.act(hidden)
        self.before.copy_(self.see(hidden).detach())
        doubled = self.see(hidden * 2)
        doubled.mul_(3).add_(self.see(self.before))
        self.before.mul_(2)
        x = self.see(x.clone())
        x.add_(self.see(self.before))
        out = self.last(doubled + x + kept)
        flat = self.see(out.view(-1))
        out.relu_()
        return self.see(out).sum() + counted.sum() + flat.sum()


@pytest.mark.thorough
@pytest.mark.skipif(which("g++") is None, reason="inductor needs a C++ compiler")
def test_calls_that_wait_come_before_what_writes_into_their_tensors() -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        net = Overwriting()
        call = torch.compile(net) if compiles else net
        with rg.record(net) as recorder:
            for _ in range(2):
                call(torch.randn(4, 8)).backward()
        found.append((recorder.history, list(net.buffers())))
    (eager, buffers), (compiled, others) = found
    assert {str(site) for site in compiled} == {str(site) for site in eager}
    for site in eager:
        seen, expected = torch.tensor(compiled[site].rms), torch.tensor(eager[site].rms)
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(others, buffers)
