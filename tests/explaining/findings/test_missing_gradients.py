"""Missing gradients and broken graphs, from the record of small trainings: against the lines of this file."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from retrograd.core.recording.record import record
from retrograd.core.runs.ending import describe_exception
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.explain import explain
from retrograd.explaining.findings.record import Record
from retrograd.explaining.gradients.explain import explain_gradients
from tests import warm
from tests.explaining.findings.by_hand import ask

Between = Callable[[Any, Tensor], Tensor]
ASKED = ("missing-gradient", "not-optimized", "no-graph", "freed-graph", "overwritten")


class Net(nn.Module):
    def __init__(self, between: Between) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.middle(self.between(self, x))))
        return found


def fine(net: Any, x: Tensor) -> Tensor:
    return torch.tanh(net.first(x))


def logged(net: Any, x: Tensor) -> Tensor:
    features = torch.tanh(net.first(x))
    net.seen = features.detach().mean().item()
    return features


def detached(net: Any, x: Tensor) -> Tensor:
    return torch.tanh(net.first(x)).detach()  # here


def by_data(net: Any, x: Tensor) -> Tensor:
    return net.first(x).data.tanh()  # type: ignore[no-any-return]  # here


def without_gradients(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        features = net.first(x)  # here
    return torch.tanh(features)


def through_numpy(net: Any, x: Tensor) -> Tensor:
    values = net.first(x).detach().numpy()  # here
    return torch.tanh(torch.from_numpy(values))


def by_list(net: Any, x: Tensor) -> Tensor:
    return torch.tensor(net.first(x).tolist())  # here


def by_choice(net: Any, x: Tensor) -> Tensor:
    return functional.one_hot(net.first(x).argmax(-1), 16).float()  # here


def rounded(net: Any, x: Tensor) -> Tensor:
    return torch.round(net.first(x) * 4) / 4  # here


def beside(net: Any, x: Tensor) -> Tensor:
    torch.tanh(net.first(x))
    return functional.pad(x, (0, 8))


def in_a_checkpoint(net: Any, x: Tensor) -> Tensor:
    return torch.tanh(checkpoint(net.first, x, use_reentrant=True))  # here


def in_the_other_checkpoint(net: Any, x: Tensor) -> Tensor:
    return torch.tanh(checkpoint(net.first, x, use_reentrant=False))


def in_a_checkpoint_of_an_input_that_requires_grad(net: Any, x: Tensor) -> Tensor:
    return torch.tanh(checkpoint(net.first, x.requires_grad_(), use_reentrant=True))


def straight_through(net: Any, x: Tensor) -> Tensor:
    features: Tensor = net.first(x)
    return features + (torch.round(features) - features).detach()


def line_here(case: Callable[..., object]) -> str:
    lines, first = inspect.getsourcelines(case)
    return f"{__file__}:{first + next(number for number, text in enumerate(lines) if '# here' in text)}"


def train(
    model: nn.Module | dict[str, nn.Module], step: Callable[[], object], steps: int = 6, error: str = ""
) -> list[Finding]:
    """What is said of some steps, which end in this error if one is given."""
    failure = None
    with record(model) as recording:
        try:
            for _ in range(steps):
                step()
        except RuntimeError as raised:
            failure = describe_exception(raised)
    assert bool(failure) == bool(error)
    assert error in (failure or {"message": ""})["message"]
    seen = Record(recording.history, status="failed" if failure else "finished", error=failure)
    return [finding for detector in ASKED for finding in ask(detector, seen)]


def make_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    x = torch.randn(32, 8)
    y = (x[:, 0] > 0).long()

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("case", [detached, by_data, without_gradients, through_numpy, by_list, by_choice, rounded])
def test_where_the_gradient_was_lost(case: Between) -> None:
    net = Net(case)
    (finding,) = train(net, make_step(net, torch.optim.SGD(net.parameters(), lr=0.1)))
    assert (finding.detector, finding.severity) == ("missing-gradient", "warning")
    assert finding.line == line_here(case)
    assert finding.site == "first"
    assert finding.message.startswith("first:bias and first:weight")
    assert net.first.weight.grad is None or not net.first.weight.grad.any()
    assert finding.repair


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_to_which_no_pass_comes() -> None:
    net = Net(in_a_checkpoint)
    (finding,) = train(net, make_step(net, torch.optim.SGD(net.parameters(), lr=0.1)))
    assert net.first.weight.grad is None
    assert (finding.detector, finding.line) == ("missing-gradient", line_here(in_a_checkpoint))
    assert "no input of it requires grad" in finding.message
    assert "use_reentrant=False" in finding.repair


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_loss_that_is_made_in_such_a_checkpoint_alone() -> None:
    net = Net(in_a_checkpoint)
    net.middle.requires_grad_(False)
    net.last.requires_grad_(False)
    optimizer = torch.optim.SGD(net.first.parameters(), lr=0.1)
    (finding,) = train(net, make_step(net, optimizer), error="does not require grad")
    assert (finding.detector, finding.severity, finding.line) == ("no-graph", "critical", line_here(in_a_checkpoint))
    assert "use_reentrant=False" in finding.repair


@pytest.mark.parametrize(
    "case",
    [
        fine,
        logged,
        straight_through,
        in_the_other_checkpoint,
        in_a_checkpoint_of_an_input_that_requires_grad,
    ],
)
def test_healthy(case: Between) -> None:
    net = Net(case)
    assert train(net, make_step(net, torch.optim.SGD(net.parameters(), lr=0.1))) == []


@pytest.mark.parametrize(
    "sites", ["*:weight.grad", "first:weight.grad", "last:*", "*:output", "*:output.grad", "*:weight.update"]
)
def test_what_was_not_selected_is_not_missing(sites: str) -> None:
    net = Net(fine)
    step = make_step(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with record(net, sites=sites) as recording:
        for _ in range(30):
            step()
    assert list(explain(recording.history)) == []


def test_frozen_on_purpose() -> None:
    net = Net(fine)
    net.first.requires_grad_(False)
    assert train(net, make_step(net, torch.optim.SGD(net.parameters(), lr=0.1))) == []
    net = Net(without_gradients)
    assert train(net, make_step(net, torch.optim.SGD([*net.middle.parameters(), *net.last.parameters()], lr=0.1))) == []


def test_beside_the_loss() -> None:
    net = Net(beside)
    (finding,) = train(net, make_step(net, torch.optim.SGD(net.parameters(), lr=0.1)))
    assert finding.detector == "missing-gradient"
    assert "no part of the loss" in finding.message


class Quantized(nn.Module):
    """A net with a straight-through estimator, by a code book or by rounding what another layer has made."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.inner, self.last = nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.codes = nn.Embedding(16, 4)
        self.aside: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.kind == "codes":
            q = self.codes(torch.cdist(h, self.codes.weight).argmin(-1))
            self.aside = [q, h.detach()]
        else:
            s = self.inner(h)
            q = s.round()
            h = s if self.kind == "mended" else h
        found: Tensor = self.last(h + (q - h).detach())  # here
        return found


def train_quantized(kind: str, *, with_aside: bool = False) -> list[Finding]:
    net = Quantized(kind)
    held = {"codes": (net.first, net.last, net.codes)}.get(kind, (net.first, net.inner, net.last))
    optimizer = torch.optim.Adam([each for layer in held for each in layer.parameters()], lr=1e-2)
    x = torch.randn(32, 8)

    def step() -> None:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        (loss + functional.mse_loss(*net.aside) if with_aside else loss).backward()
        optimizer.step()

    return train(net, step)


def test_a_straight_through_estimator_is_not_advised_away() -> None:
    (found,) = train_quantized("codes")
    assert "that of a straight-through estimator" in found.message
    assert "add a loss of what is made there, as mse_loss(q, x.detach())" in found.repair
    assert train_quantized("codes", with_aside=True) == []
    (found,) = train_quantized("rounded")
    assert found.repair == "subtract what `round` takes, and add `detach` of the difference to that."
    assert train_quantized("mended") == []


def test_a_forward_without_graph_beside_the_one_that_trains_is_no_reason() -> None:
    """Gradient caching: outputs are made under no_grad, and the forward that trains runs inside of a pass."""
    net = nn.ModuleDict({"a": nn.Linear(4, 8), "b": nn.Linear(8, 2), "pooler": nn.Linear(8, 8)})
    model = Pooled(net)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step() -> None:
        x = torch.randn(8, 4)
        with torch.no_grad():
            out = model(x)[0].requires_grad_()
        gradient = torch.autograd.grad(out.pow(2).mean(), out)[0]
        loss = torch.ones((), requires_grad=True)

        def run_again(_: Tensor) -> None:
            with torch.enable_grad():
                (model(x)[0] * gradient).sum().backward()

        loss.register_hook(run_again)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    (found,) = train(model, step)
    assert "pooler:bias and pooler:weight never get a gradient" in found.message.replace("net.", "")
    assert "no_grad" not in found.message + found.repair
    assert "is a part of the loss, or freeze" in found.repair


class Pooled(nn.Module):
    def __init__(self, net: nn.ModuleDict) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.net["a"](x).tanh()
        return self.net["b"](h), self.net["pooler"](h)


def test_a_layer_that_is_never_called() -> None:
    net = Net(fine)
    net.spare = nn.Linear(3, 3)
    (finding,) = train(net, make_step(net, torch.optim.SGD(net.parameters(), lr=0.1)))
    assert finding.severity == "warning"
    assert "spare is never called" in finding.message


@pytest.mark.parametrize("is_master", [False, True])
def test_the_optimizer_holds_a_copy(is_master: bool) -> None:
    """Master weights are a copy, too: their gradients are written by hand, and their values copied back."""
    net = Net(fine)
    copy = deepcopy(net).double()
    optimizer = torch.optim.SGD(copy.parameters(), lr=0.1)
    with record({"net": net, "copy": copy}) as recording:
        for _ in range(30):
            net.zero_grad()
            net(torch.randn(4, 8)).square().mean().backward()
            for parameter, master in zip(net.parameters(), copy.parameters(), strict=True):
                if is_master and parameter.grad is not None:
                    master.grad = parameter.grad.double()
            optimizer.step()
            if is_master:
                net.load_state_dict(copy.state_dict())
    found = list(explain(recording.history))
    if is_master:
        assert found == []
    else:
        (finding,) = found
        assert (
            "copy is never called, and net, whose parameters have the same names, is in no optimizer" in finding.message
        )
        assert "net" in finding.repair


def test_experts_that_were_not_used_are_a_note() -> None:
    def use_one(net: Any, x: Tensor) -> Tensor:
        features: Tensor = net.experts[0](torch.tanh(net.first(x)))
        return features

    net = Net(use_one)
    net.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
    (finding,) = train(net, make_step(net, torch.optim.SGD(net.parameters(), lr=0.1)))
    assert finding.severity == "note"


def test_a_zero_initialised_gate_is_silent() -> None:
    def gated(net: Any, x: Tensor) -> Tensor:
        return functional.pad(x, (0, 8)) + net.gate * torch.tanh(net.first(x))

    net = Net(gated)
    net.gate = nn.Parameter(torch.zeros(()))
    assert train(net, make_step(net, torch.optim.SGD(net.parameters(), lr=0.1))) == []


Gan = tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]


def make_gan() -> Gan:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizers = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, critic))
    return generator, critic, *optimizers


def test_a_gan_is_silent() -> None:
    generator, critic, of_generator, of_critic = make_gan()

    def step() -> None:
        fake = generator(torch.randn(16, 4))
        of_critic.zero_grad()
        (critic(fake.detach()).mean() - critic(torch.randn(16, 8)).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(fake)).mean().backward()
        of_generator.step()

    assert train({"generator": generator, "critic": critic}, step) == []


def test_the_step_between_two_passes() -> None:
    generator, critic, of_generator, of_critic = make_gan()

    def step() -> None:
        judged = critic(generator(torch.randn(16, 4)))
        judged.mean().backward(retain_graph=True)
        of_critic.step()  # here
        (-judged).mean().backward()
        of_generator.step()

    error = "modified by an inplace operation"
    (finding,) = train({"generator": generator, "critic": critic}, step, error=error)
    assert (finding.detector, finding.line) == ("overwritten", line_here(step))
    assert "SGD.step" in finding.message
    assert "after the last backward()" in finding.repair


def test_a_write_into_what_was_saved() -> None:
    def write(net: Any, x: Tensor) -> Tensor:
        features = torch.sigmoid(net.first(x))
        features += 1.0  # here
        return features

    net = Net(write)
    step = make_step(net, torch.optim.SGD(net.parameters(), lr=0.1))
    (finding,) = train(net, step, error="modified by an inplace operation")
    assert (finding.detector, finding.line) == ("overwritten", line_here(write))
    assert "sigmoid" in finding.message


def test_the_write_is_told_by_how_often_the_version_was_counted_up() -> None:
    def write(net: Any, x: Tensor) -> Tensor:
        states = torch.zeros(4, len(x), 16)
        states[0] = net.first(x)
        for k in range(3):
            states[k + 1] = torch.tanh(net.middle(states[k]))  # here
        return states[3]

    net = Net(write)
    step = make_step(net, torch.optim.SGD(net.parameters(), lr=0.1))
    (finding,) = train(net, step, error="modified by an inplace operation")
    assert (finding.detector, finding.line) == ("overwritten", line_here(write))


def test_parts_that_no_optimizer_holds() -> None:
    net = Net(fine)
    (finding,) = train(net, make_step(net, torch.optim.SGD([*net.first.parameters(), *net.last.parameters()], lr=0.1)))
    assert (finding.detector, finding.severity) == ("not-optimized", "warning")
    assert "middle:weight" in finding.message
    net = Net(fine)
    (finding,) = train(net, make_step(net, torch.optim.SGD(net.last.parameters(), lr=0.1)))
    assert (finding.detector, finding.severity) == ("not-optimized", "warning")
    net = Net(fine)
    with torch.no_grad():
        for each in (net.first.weight, net.middle.weight):
            each.mul_(2.0)  # as if it had been trained before
    (finding,) = train(net, make_step(net, torch.optim.SGD(net.last.parameters(), lr=0.1)))
    assert (finding.detector, finding.severity) == ("not-optimized", "note")


def test_a_parameter_that_no_operation_takes() -> None:
    net = Net(fine)
    net.gain = nn.Parameter(torch.ones(5))
    (finding,) = train(net, make_step(net, torch.optim.SGD(net.parameters(), lr=0.1)))
    assert (finding.detector, finding.severity) == ("missing-gradient", "warning")
    assert "no operation takes it" in finding.message


def test_a_loss_that_is_a_new_leaf() -> None:
    net = Net(fine)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        loss = net(torch.randn(8, 8)).square().mean()
        torch.tensor(loss.item(), requires_grad=True).backward()  # here
        optimizer.step()

    (finding,) = train(net, step)
    assert (finding.detector, finding.line) == ("no-graph", line_here(step))


def test_a_loss_without_a_graph() -> None:
    net = Net(fine)
    x = torch.randn(32, 8)

    def step() -> None:
        hits = net(x).argmax(-1) == 0  # here
        hits.float().mean().backward()

    (finding,) = train(net, step, error="does not require grad")
    assert (finding.detector, finding.line) == ("no-graph", line_here(step))
    assert "argmax" in finding.message


def test_a_state_that_is_carried_over() -> None:
    cell = nn.RNNCell(3, 5)
    state = torch.zeros(2, 5)

    def step() -> None:
        nonlocal state
        state = cell(torch.randn(2, 3), state)  # here
        state.square().mean().backward()

    (finding,) = train(cell, step, error="second time")
    assert finding.detector == "freed-graph"
    assert "graph of an earlier step" in finding.message
    assert "takes float32[2, 5] that was made before this forward" in finding.message
    assert finding.line == line_here(step)


def test_a_state_that_is_kept_in_the_model() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 5)
            self.mean = torch.zeros(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.fc(x)
            self.mean = 0.9 * self.mean + out.mean(0)  # here
            return out - self.mean

    net = Mean()

    def step() -> None:
        net(torch.randn(4, 5)).square().mean().backward()

    (finding,) = train(net, step, error="second time")
    assert (finding.detector, finding.line) == ("freed-graph", line_here(Mean.forward))
    assert "takes float32[5] that was made before this forward" in finding.message


def test_one_graph_twice() -> None:
    net = Net(fine)

    def step() -> None:
        loss = net(torch.randn(4, 8)).square().mean()
        loss.backward()
        loss.backward()  # here

    (finding,) = train(net, step, error="second time")
    assert finding.detector == "freed-graph"
    assert finding.line == line_here(step)
    assert "one graph" in finding.message


SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.rest = [nn.Linear(8, 8), nn.Linear(8, 8)]
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        x = self.first(x).tanh()
        for layer in self.rest:
            x = layer(x).tanh()
        return self.last(x)

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(6):
    optimizer.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


def test_layers_in_a_list(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "retrograd", "run", "--quiet", "-o", "run", "train.py"]
    warm.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    finding = explain(tmp_path / "run")[0]
    assert (finding.detector, finding.severity) == ("layers-in-a-list", "critical")
    assert "layer (Linear) and layer_2 (Linear)" in finding.message


def test_a_loss_that_is_a_leaf_of_its_own() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model) as recording:
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.tensor(model(torch.randn(8, 4)).square().mean().item(), requires_grad=True)
            loss.backward()
            optimizer.step()
    [found] = explain(recording.history).of("no-graph")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found.severity == "critical"
    assert "item" in found.message
    lines, first = inspect.getsourcelines(test_a_loss_that_is_a_leaf_of_its_own)
    made = next(number for number, line in enumerate(lines, first) if ".item()" in line)
    assert found.line == f"{__file__}:{made}"


class Gated(nn.Module):
    """A branch whose gate begins at zero, and whose weights do so too, or not."""

    def __init__(self, *, is_zero: bool) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.gate = nn.Parameter(torch.zeros(1))
        if is_zero:
            for each in self.branch.parameters():
                nn.init.zeros_(each)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.last(hidden + self.gate * self.branch(hidden))


def train_gated(*, is_zero: bool) -> tuple[Gated, list[Finding], str]:
    torch.manual_seed(0)
    model = Gated(is_zero=is_zero)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with explain_gradients(model) as why:
        (model(torch.ones(2, 4)) - 1).square().mean().backward()
    optimizer.zero_grad()

    def step() -> None:
        optimizer.zero_grad()
        (model(torch.randn(8, 4)) - 1).square().mean().backward()
        optimizer.step()

    return model, train(model, step), str(why)


def test_a_zero_gate_of_a_zero_branch_stays_so_and_is_said_to() -> None:
    model, said, why = train_gated(is_zero=True)
    assert not model.gate.any()
    assert not model.branch.weight.any()
    [found] = [each for each in said if each.detector == "missing-gradient"]
    assert "part of the loss" not in found.repair  # it is one
    assert "two factors that both begin at zero" in found.repair
    assert "first step only" not in why
    model, said, why = train_gated(is_zero=False)  # the remedy
    assert model.gate.any()
    assert not [each for each in said if each.detector == "missing-gradient"]


class Frozen(nn.Module):
    """Two parts in front of a head, each under its own torch.no_grad()."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU())
        self.two = nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4))
        self.bias = nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(4, 2)
        self.together = together

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.one(x)
            x = self.two(x) if self.together else x
        if not self.together:
            x = x + self.bias[:, None]
            with torch.no_grad():
                x = self.two(x)
        return self.head(x.mean(-1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("together", [True, False])
def test_all_that_one_no_grad_covers_is_one_finding(together: bool) -> None:
    torch.manual_seed(0)
    net = Frozen(together=together)
    optimizer = torch.optim.SGD([*net.one.parameters(), *net.two.parameters(), *net.head.parameters()], lr=0.1)
    with record(net) as recording:
        for _ in range(4):
            optimizer.zero_grad()
            functional.cross_entropy(net(torch.randn(8, 2, 12)), torch.randint(2, (8,))).backward()
            optimizer.step()
    found = explain(recording).of("missing-gradient")
    counted = [next(each.value for each in one.evidence if each.name == "parameters") for one in found]
    assert counted == ([8] if together else [4, 4])  # a weight and a bias of each of two convolutions and two norms
    assert all("in torch.no_grad()" in each.message for each in found)


def by_hits(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return 1 - (net(x).argmax(1) == y).float().mean().requires_grad_()  # here


def by_a_leaf(net: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.cross_entropy(net(x).detach(), y)  # here
    return loss.requires_grad_()


def by_all(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(net(x), y)


@pytest.mark.parametrize("loss_of", [by_hits, by_a_leaf, by_all])
def test_a_loss_that_requires_grad_by_itself_alone(loss_of: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record(net) as recording:
        for _ in range(4):
            optimizer.zero_grad()
            loss_of(net, torch.randn(8, 8), torch.randint(2, (8,))).backward()
            optimizer.step()
    found = explain(recording).of("no-graph")
    if loss_of is by_all:
        assert not len(found)
        return
    [said] = found
    assert (said.severity, said.line) == ("critical", line_here(loss_of))
    assert all(each.grad is None for each in net.parameters())
    assert "Backward has no way from the loss to the model" in said.message
