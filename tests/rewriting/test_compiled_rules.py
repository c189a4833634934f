"""Rules inside torch.compile: the same numbers as in eager code, one graph, and nothing wrong in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from retrograd.core.errors import CannotRewriteError, GraphBreakError, RetrogradWarning, RuleError
from tests.rewriting.models import gradients, halve, make_net

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]

Rules = dict[str, Any]
Prepare = Callable[[nn.Module, str], Callable[[Tensor], Tensor]]


class Counting(rg.rules.Rule):
    """Remembers how often it was asked."""

    def __call__(self, value: Tensor, state: Any) -> Tensor:
        count = state.get("count", 0) + 1
        state.put("count", count)
        return value * (1 + 0.1 * count)


class ByValue(rg.rules.Rule):
    needs_value = True

    def __call__(self, value: Tensor, state: Any) -> Tensor:
        return value * state.value.abs()


class ByInput(rg.rules.Rule):
    needs_input = True

    def __call__(self, value: Tensor, state: Any) -> Tensor:
        return value * state.input.mean()


def print_and_wait(value: Tensor, state: Any) -> Tensor:
    """What no compiler can trace."""
    print(f"{state.site} {value.norm().item():.3f} {value.detach().numpy().shape}")
    return value * 0.5


def squash(value: Tensor, state: Any) -> Tensor:
    """Its backward needs what it has computed."""
    return (value * value).tanh().exp()


def keep_last(value: Tensor, state: Any) -> Tensor | None:
    """Holds what it is given, and returns what it holds."""
    last = state.last("given", 2)
    last.add(value)
    return last[0] if len(last) == 2 else None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + self.fc(x).tanh() * scale


class Blocks(nn.Module):
    def __init__(self, part: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.shared = nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5) if self.part is None else self.part(block, x)
        return self.head(self.shared(self.shared(x)))


def again(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


def again_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)  # type: ignore[no-any-return]


def whole(net: nn.Module, backend: str) -> Any:
    return torch.compile(net, backend=backend, fullgraph=True)


def in_place(net: nn.Module, backend: str) -> Any:
    net.compile(backend=backend, fullgraph=True)
    return net


def per_block(net: nn.Module, backend: str) -> Any:
    for block in net.blocks:  # type: ignore[union-attr]
        block.compile(backend=backend, fullgraph=True)
    return net


def by_function(net: nn.Module, backend: str) -> Any:
    return torch.compile(lambda x: net(x), backend=backend, fullgraph=True)


def train(net: nn.Module, call: Callable[[Tensor], Tensor], steps: int = 3) -> tuple[list[Tensor], dict[str, Tensor]]:
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    losses = []
    for step in range(steps):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        net.eval()
        with torch.no_grad():
            losses.append(call(x).detach().clone())
        net.train()
    return losses, gradients(net)


def compare(make: Callable[[], nn.Module], rules: Callable[[], Rules], prepare: Prepare, backend: str) -> None:
    """Train eagerly with the rules, and compiled."""
    eager = make()
    with rg.rewrite(eager, rules()):
        expected = train(eager, eager)
    net = make()
    with rg.rewrite(net, rules()):
        found = train(net, prepare(net, backend))
    for one, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(one, other)
    assert found[1].keys() == expected[1].keys()
    for name, each in found[1].items():
        torch.testing.assert_close(each, expected[1][name])
    assert not counters["graph_break"]


KINDS: dict[str, Callable[[], Rules]] = {
    "output": lambda: {"1:output": Counting()},
    "output.grad": lambda: {"1:output.grad": Counting()},
    "input": lambda: {"2:input.input": Counting()},
    "input.grad": lambda: {"2:input.input.grad": Counting()},
    "several": lambda: {
        "*:outputs.grad": [rg.rules.ClipNorm(0.1), rg.rules.Scale(2.0)],
        "3:output": rg.rules.Clamp(0.5, 0.8),
        "0:weight.grad": Counting(),
        "4:output.grad": rg.rules.ZClip(),
    },
    "value beside": lambda: {"1:output.grad": ByValue()},
    "input beside": lambda: {"2:output.grad": ByInput(), "4:input.input.grad": ByInput()},
    "printing": lambda: {"1:output": print_and_wait, "2:output.grad": print_and_wait},
    "with a graph": lambda: {"0:output": squash, "2:output": squash},
    "keeping": lambda: {"*:outputs.grad": keep_last},
    "noise": lambda: {"1:output.grad": rg.rules.Noise(0.1, seed=1)},
}


REUSES_MEMORY = {"several", "value beside", "keeping", "noise"}
"""What may go wrong where Inductor generates the code, and not where operations run one by one."""


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        pytest.param(
            kind, backend, marks=[] if backend == "aot_eager" or kind in REUSES_MEMORY else pytest.mark.thorough
        )
        for kind in KINDS
        for backend in ("aot_eager", "inductor")
    ],
)
def test_as_in_eager_code(kind: str, backend: str) -> None:
    compare(make_net, KINDS[kind], whole, backend)
    assert counters["stats"]["unique_graphs"] == 2  # in training and in evaluation


@pytest.mark.parametrize("prepare", [whole, in_place, per_block, by_function])
@pytest.mark.parametrize("part", [None, again, again_reentrant])
def test_however_it_is_compiled(prepare: Prepare, part: Any) -> None:
    if part is again_reentrant and prepare is not per_block:
        pytest.skip("torch.compile does not trace it")

    def rules() -> Rules:
        return {
            "blocks.*:output": Counting(),
            "blocks.*.fc:output.grad": Counting(),
            "blocks.1:input.x.grad": rg.rules.Scale(3.0),
            "shared#2:output": rg.rules.Scale(0.5),
            "shared#1:output.grad": Counting(),
            "self:output.grad": rg.rules.Scale(2.0),
        }

    compare(lambda: Blocks(part), rules, prepare, "aot_eager")


def test_hand_written() -> None:
    net, x = make_net(), torch.randn(5, 3)
    with rg.rewrite(net, {"1:output": halve, "3:output.grad": lambda gradient, state: gradient * 3}):
        out = torch.compile(net, backend="aot_eager")(x)
        out.sum().backward()
    found = gradients(net)
    net.zero_grad()
    hidden = net[3](net[2](net[1](net[0](x)) * 0.5))
    hidden.register_hook(lambda gradient: gradient * 3)
    expected = net[4](hidden)
    torch.testing.assert_close(out, expected)
    expected.sum().backward()
    for name, each in gradients(net).items():
        torch.testing.assert_close(found[name], each)


def test_rules_come_and_go_without_a_further_graph() -> None:
    net, x = make_net(), torch.randn(5, 3)
    plain = net(x).detach()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for factor in (1.0, 2.0, 3.0):
        with rg.rewrite(net, {"4:output": rg.rules.Scale(factor)}):
            torch.testing.assert_close(compiled(x), plain * factor)
        torch.testing.assert_close(compiled(x), plain)
    assert counters["stats"]["unique_graphs"] == 2
    with rg.rewrite(net, {"4:output": rg.rules.Scale(2.0), "3:output": rg.rules.Zero()}):
        torch.testing.assert_close(compiled(x), 2 * net[4].bias.expand(5, 1))
    with rg.rewrite(net, {"3:output": rg.rules.Zero()}):
        torch.testing.assert_close(compiled(x), net[4].bias.expand(5, 1))
    torch.testing.assert_close(compiled(x), plain)


@pytest.mark.parametrize("prepare", [whole, in_place])
def test_compiled_before(prepare: Prepare) -> None:
    net, x = Blocks(), torch.randn(5, 3)
    plain = net(x).detach()
    compiled = prepare(net, "aot_eager")
    with rg.rewrite(compiled, {"head:output": halve}):  # type: ignore[arg-type]
        torch.testing.assert_close(compiled(x), plain * 0.5)
    net = Blocks()
    compiled = prepare(net, "aot_eager")
    compiled(x)
    with pytest.raises(CannotRewriteError, match=r"torch\.compiler\.reset"):
        rg.rewrite(compiled, {"head:output": halve})  # type: ignore[arg-type]
    torch.compiler.reset()
    with rg.rewrite(compiled, {"head:output": halve}):  # type: ignore[arg-type]
        torch.testing.assert_close(compiled(x), net(x))


def test_values_of_parameters_break_the_graph() -> None:
    net, x = make_net(), torch.randn(5, 3)
    with rg.rewrite(net, {"2:weight": halve}):
        with pytest.warns(RetrogradWarning, match="2:weight"):
            found = torch.compile(net, backend="aot_eager")(x)
        torch.testing.assert_close(found, net(x))
        torch._dynamo.reset()
        with pytest.raises(GraphBreakError, match="2:weight"):
            torch.compile(net, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("site", "rule"),
    [
        ("1:output.grad", lambda gradient, state: gradient.sum()),
        ("1:output", lambda value, state: value.double()),
        ("1:output.grad", lambda gradient, state: gradient.mul_(2)),
    ],
)
def test_bad_rules(backend: str, site: str, rule: Any) -> None:
    net = make_net()
    with rg.rewrite(net, {site: rule}), pytest.raises(RuleError, match=site):
        torch.compile(net, backend=backend)(torch.randn(5, 3)).sum().backward()


def test_a_rule_that_trains_something_else_is_refused() -> None:
    net, other = make_net(), nn.Parameter(torch.ones(4))
    with rg.rewrite(net, {"1:output": lambda value, state: value * other}), pytest.raises(CannotRewriteError):
        torch.compile(net, backend="aot_eager")(torch.randn(5, 3))


def test_written_into_is_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Flatten(0), nn.ReLU(inplace=True))
    with rg.rewrite(net, {"1:output.grad": halve}), pytest.raises(Exception, match="view and is being modified"):
        torch.compile(net, backend="aot_eager")(torch.randn(5, 3)).sum().backward()


def test_recorded_too(tmp_path: Path) -> None:
    def run(name: str, compiles: bool) -> Any:
        net = make_net()
        sites = ["*:outputs", "*:outputs.grad", "3:output.before.grad"]
        rules = {"3:output.grad": rg.rules.ClipNorm(0.01), "1:output": halve}
        with rg.record(net, tmp_path / name, sites=sites), rg.rewrite(net, rules):
            train(net, torch.compile(net, backend="aot_eager", fullgraph=True) if compiles else net)
        return rg.open_run(tmp_path / name).history

    eager, compiled = run("eager", False), run("compiled", True)
    assert {str(site) for site in compiled} == {str(site) for site in eager}
    for site in eager:
        torch.testing.assert_close(
            torch.tensor(compiled[str(site)].rms), torch.tensor(eager[str(site)].rms), equal_nan=True
        )
    events = [
        [(each.moment.step, each.name) for each in history.events if each.kind == "rewrite"]
        for history in (eager, compiled)
    ]
    assert events[0] == events[1]
    assert events[0]


class ReturnsWithin(nn.Module):
    """Returns what it computes with, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.a(x)
        return self.b(hidden), hidden


def run_within(rules: Rules, prepare: Prepare | None) -> tuple[Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    net = nn.Sequential(ReturnsWithin())
    called = net if prepare is None else prepare(net[0] if prepare is per_part else net, "aot_eager")
    with rg.rewrite(net, rules), rg.record(net, sites=["*:outputs.grad", "*:inputs.grad"]) as recorder:
        out, hidden = net(torch.ones(1, 2)) if prepare is per_part else called(torch.ones(1, 2))
        (out.sum() + hidden.sum()).backward()
    history = recorder.history
    return net[0].a.weight.grad, {
        site: history[site].rms for site in ("0:output.0.grad", "0:output.1.grad", "0.b:input.input.grad")
    }


def per_part(net: nn.Module, backend: str) -> Callable[[Tensor], Tensor]:
    net.compile(backend=backend, fullgraph=True)
    return net


@pytest.mark.parametrize(
    ("site", "prepare"), [("0:output.1.grad", whole), ("0:output.0.grad", per_part), ("0.b:input.*.grad", per_part)]
)
def test_an_output_that_is_used_within(site: str, prepare: Prepare) -> None:
    expected, expected_rms = run_within({site: halve}, None)
    found, found_rms = run_within({site: halve}, prepare)
    torch.testing.assert_close(found, expected)
    for name, rms in expected_rms.items():
        torch.testing.assert_close(found_rms[name], rms)


class ViewWithin(ReturnsWithin):
    """Returns a view that it computes with, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.a(x)[0]
        return self.b(hidden), hidden


def leave_values(tensor: Tensor, state: Any) -> Tensor | None:
    return tensor * 0.5 if str(state.site).endswith(".grad") else None


def leave(tensor: Tensor, state: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        (ViewWithin, {"0.0:output.1.grad": halve}),
        (ReturnsWithin, {"0.0:output.*.grad": halve, "0.0:output.0": halve}),
        (ViewWithin, {"0.0:output.1*": leave_values}),
        (ReturnsWithin, {"0.0:output.1": halve, "0.0:output.1.grad": halve}),
        (ReturnsWithin, {"0.0:output.1*": leave_values, "0:output.1": leave, "0:output.1.grad": halve}),
    ],
)
def test_a_value_that_is_left_alone_keeps_its_gradient_from_within(kind: type[nn.Module], rules: Rules) -> None:
    found, histories = [], []
    for compiles in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Sequential(kind()))
        with rg.rewrite(net, rules), rg.record(net, sites=["0*:outputs.grad"]) as recorder:
            out, hidden = (whole(net, "aot_eager") if compiles else net)(torch.ones(1, 2))
            (out.sum() + hidden.sum()).backward()
        found.append(gradients(net))
        histories.append({str(site): recorder.history[site].rms for site in recorder.history})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected)
    assert histories[1].keys() == histories[0].keys()
    for name, rms in histories[0].items():
        torch.testing.assert_close(histories[1][name], rms)


def test_the_gradient_of_an_input_behind_a_view_whose_gradient_has_rules() -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(0), Block())
        x = torch.randn(1, 3, requires_grad=True)
        with rg.rewrite(net, {"0:output.grad": halve}), rg.record(net, sites=["1.fc:inputs.grad"]) as recorder:
            (whole(net, "aot_eager") if compiles else net)(x).square().sum().backward()
        found.append(recorder.history["1.fc:input.input.grad"].rms)
    torch.testing.assert_close(found[1], found[0])


class Parted(ReturnsWithin):
    """Uses what it returns in one way or another; with no kind, not at all."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "checkpointed":
            return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]
        hidden = self.a(x)
        given = hidden.relu_() if self.kind == "written" else hidden[0] if self.kind == "a view" else hidden
        out = self.b(given if self.kind == "a view" else hidden if self.kind else x)
        if self.kind == "broken":
            torch._dynamo.graph_break()
        return out + 1, given


class HandsOn(nn.Module):
    """Returns what a part has returned."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, given = self.part(x)
        return out, rg.watch("given", given)


def gradient_before(site: str, kind: str, *, compiles: bool, runs_first: bool = False) -> Tensor:
    """The gradient of the weight before a tensor whose gradient is halved."""
    torch.manual_seed(0)
    part = Parted(kind)
    net = HandsOn(part)
    if compiles:
        part.compile(backend="aot_eager")
    if runs_first:
        net(torch.ones(1, 2))
    with rg.rewrite(net, {site: halve}):
        out, given = net(torch.ones(1, 2))
        (out.sum() + given.sum()).backward()
    return part.a.weight.grad  # type: ignore[return-value]


WITHIN = ["plain", "written", "a view", "broken", "checkpointed"]


@pytest.mark.parametrize(
    ("site", "kind", "runs_first"),
    [
        *(("part:output.1.grad", kind, False) for kind in WITHIN),
        ("self:output.1.grad", "plain", False),
        ("watch/given.grad", "plain", False),
        ("self:output.1.grad", "plain", True),
        ("watch/given.grad", "", True),
    ],
)
def test_a_part_of_a_gradient_is_not_rewritten(site: str, kind: str, runs_first: bool) -> None:
    message = "before the rules were set" if runs_first else "computes with it"
    with pytest.raises(CannotRewriteError, match=message):
        gradient_before(site, kind, compiles=True, runs_first=runs_first)


@pytest.mark.parametrize("site", ["part:output.1.grad", "self:output.1.grad", "watch/given.grad"])
def test_a_whole_gradient_is_rewritten(site: str) -> None:
    found = gradient_before(site, "", compiles=True)
    torch.testing.assert_close(found, gradient_before(site, "", compiles=False))


def test_a_single_tensor_of_code_that_was_compiled_before() -> None:
    net, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    compiled = torch.compile(lambda x: net(x), backend="aot_eager")
    compiled(x)
    with rg.rewrite(None, {"watch/out.grad": halve}):
        rg.watch("out", compiled(x)).sum().backward()
    torch.testing.assert_close(net[0].weight.grad, torch.full((2, 2), 0.5))


def test_what_is_computed_from_what_code_returns_that_was_compiled_before() -> None:
    part, x = Parted("plain"), torch.ones(1, 2)
    part.compile(backend="aot_eager")
    part(x)
    with rg.rewrite(None, {"watch/out.grad": halve}):
        rg.watch("out", part(x)[1].neg()).sum().backward()
    torch.testing.assert_close(part.a.weight.grad, torch.full((2, 2), -0.5))
