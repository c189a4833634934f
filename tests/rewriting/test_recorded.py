"""A recorder sees what the last rule returned, whoever came first; and each change is an event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from retrograd.core.errors import CannotRewriteError
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.rule import SiteState
from tests.core.recording.collector import Collector, collect
from tests.rewriting.models import add_one, assert_same, gradients, halve, leave, make_net

ORDERS = ["recorder first", "rules first"]


def third(value: Tensor, state: SiteState) -> Tensor:
    return value / 3


@contextmanager
def both(order: str, net: Any, rules: Any, **choices: Any) -> Iterator[Collector]:
    with ExitStack() as stack:
        if order == "rules first":
            stack.enter_context(rewrite(net, rules))
        seen = stack.enter_context(collect(net, **choices))
        if order == "recorder first":
            stack.enter_context(rewrite(net, rules))
        yield seen


def kept(seen: Collector, site: str) -> Tensor:
    (found,) = seen.kept(site)
    return found.tensor


EVERYTHING: dict[str, Any] = {"sites": ["*"], "tensors": "*"}


@pytest.mark.parametrize("order", ORDERS)
def test_outputs(order: str) -> None:
    net, x = make_net(), torch.randn(5, 3)
    rules = {"1:output": add_one, "1:output.grad": [halve, third], "self:output.grad": third, "3:output.grad": leave}
    with both(order, net, rules, **EVERYTHING) as seen:
        net(x).square().sum().backward()
    h = torch.tanh(net[0](x)) + 1
    h.retain_grad()
    h.register_hook(lambda gradient: gradient * 0.5 / 3)
    out = net[2:](h)
    out.register_hook(lambda gradient: gradient / 3)
    out.retain_grad()
    out.square().sum().backward()
    assert torch.equal(kept(seen, "1:output"), h)
    assert torch.equal(kept(seen, "2:input.input"), h)
    assert torch.equal(kept(seen, "1:output.grad"), h.grad)  # type: ignore[arg-type]
    for site in ("self:output.grad", "4:output.grad"):  # one tensor
        assert torch.equal(kept(seen, site), out.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ORDERS)
def test_inputs(order: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.part = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x)
            return h * 7 + self.part(h)

    net, x = Net(), torch.randn(4, 3)
    rules = {"part:input.input": add_one, "part:input.input.grad": third}
    with both(order, net, rules, **EVERYTHING) as seen:
        net(x).square().sum().backward()
    h = net.stem(x)
    through = h + 1
    through.retain_grad()
    through.register_hook(lambda gradient: gradient / 3)
    h.retain_grad()
    (h * 7 + net.part(through)).square().sum().backward()
    assert torch.equal(kept(seen, "part:input.input"), through)
    assert torch.equal(kept(seen, "part:input.input.grad"), through.grad)  # type: ignore[arg-type]
    assert torch.equal(kept(seen, "stem:output.grad"), h.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ORDERS)
def test_inputs_of_a_module_that_works_in_place(order: str) -> None:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)), torch.randn(5, 3)
    with both(order, net, {"1:input.input.grad": third}, **EVERYTHING) as seen:
        net(x).sum().backward()
    h = net[0](x)
    h.retain_grad()
    h.register_hook(lambda gradient: gradient / 3)
    net[2](torch.relu(h)).sum().backward()
    for site in ("1:input.input.grad", "0:output.grad"):
        assert torch.equal(kept(seen, site), h.grad), site  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ORDERS)
def test_parameters(order: str) -> None:
    net, x = make_net(), torch.randn(5, 3)
    rules = {"0:weight.grad": [third, third], "2:bias.grad": lambda gradient, state: gradient * 0}
    with both(order, net, rules, **EVERYTHING) as seen:
        net(x).sum().backward()
    net.zero_grad()
    net(x).sum().backward()
    expected = gradients(net)
    assert torch.equal(kept(seen, "0:weight.grad"), expected["0.weight"] / 3 / 3)
    assert torch.equal(kept(seen, "2:bias.grad"), torch.zeros(4))
    assert torch.equal(kept(seen, "2:weight.grad"), expected["2.weight"])


@pytest.mark.parametrize("order", ORDERS)
def test_nests_and_identities(order: str) -> None:
    class Split(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"a": x, "b": (x * 2, x * 3)}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.split = nn.Linear(3, 3), Split()

        def forward(self, x: Tensor) -> Tensor:
            nest = self.split(self.stem(x))
            return nest["a"] + nest["b"][0] + nest["b"][1]

    net, x = Net(), torch.randn(4, 3)
    with both(order, net, {"split:output.a.grad": halve, "split:output.b.1.grad": third}, **EVERYTHING) as seen:
        net(x).sum().backward()
    assert torch.equal(kept(seen, "split:output.a.grad"), torch.full((4, 3), 0.5))
    assert torch.equal(kept(seen, "split:output.b.1.grad"), torch.full((4, 3), 1 / 3))
    assert torch.equal(kept(seen, "stem:output.grad"), torch.full((4, 3), 0.5 + 2 + 3 * torch.tensor(1 / 3).item()))


@pytest.mark.parametrize("order", ORDERS)
def test_recording_does_not_change_what_the_rules_make(order: str) -> None:
    rules = {"*:output.grad": third, "1:output": add_one, "2:input.input.grad": halve, "0:weight.grad": halve}
    plain, net, x = make_net(), make_net(), torch.randn(5, 3)
    with rewrite(plain, rules):
        plain(x).square().sum().backward()
    with both(order, net, rules, **EVERYTHING):
        net(x).square().sum().backward()
    assert_same(gradients(net), gradients(plain))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(order: str, reentrant: bool) -> None:
    class Saved(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    net, x = Saved(*make_net()), torch.randn(5, 3, requires_grad=True)
    with both(order, net, {"1:output.grad": third, "1:output": add_one}, **EVERYTHING) as seen:
        net(x).sum().backward()
    h = torch.tanh(net[0](x)) + 1
    h.retain_grad()
    h.register_hook(lambda gradient: gradient / 3)
    nn.Sequential(*net[2:])(h).sum().backward()
    assert torch.equal(kept(seen, "1:output"), h)
    assert torch.equal(kept(seen, "1:output.grad"), h.grad)  # type: ignore[arg-type]
    assert [(event.name, event.text) for event in seen.events_of("rewrite")].count(("1:output", "add_one")) == 1


@pytest.mark.parametrize("order", ORDERS)
def test_before_only_where_it_is_asked_for(order: str) -> None:
    net, x = make_net(), torch.randn(5, 3)
    rules = {"1:output": add_one, "1:output.grad": third, "0:output.grad": leave}
    sites = ["1:output.before", "1:output.before.grad", "0:output.before.grad", "1:output*"]
    with both(order, net, rules, sites=sites, tensors=sites) as seen:
        net(x).sum().backward()
    h = torch.tanh(net[0](x))
    changed = h + 1
    changed.retain_grad()
    net[2:](changed).sum().backward()
    assert torch.equal(kept(seen, "1:output.before"), h)
    assert torch.equal(kept(seen, "1:output.before.grad"), changed.grad)  # type: ignore[arg-type]
    assert "0:output.before.grad" not in seen.sites()
    with both(order, net, rules, **EVERYTHING) as seen:
        net(x).sum().backward()
    assert not [site for site in seen.sites() if "before" in site]


def test_events() -> None:
    net, x = make_net(), torch.randn(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rules = {
        "1:output": add_one,
        "1:output.grad": [halve, leave, lambda gradient, state: gradient * 1],
        "0:weight.grad": lambda gradient, state: gradient * 3,
        "4:bias.grad": leave,
    }
    with collect(net) as seen, rewrite(net, rules):
        for _ in range(2):
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
    events = seen.events_of("rewrite")
    assert [(event.moment.step, event.name) for event in events] == [
        (step, name) for step in (0, 1) for name in ("1:output", "1:output.grad", "0:weight.grad")
    ]
    assert {event.moment.phase for event in events} == {"train"}
    assert [event.value for event in events[1:3]] == pytest.approx([0.5, 2.0])
    assert [event.text for event in events[:2]] == ["add_one", "halve"]
    torch.manual_seed(0)
    h = torch.tanh(make_net()[0](x))
    assert events[0].value == pytest.approx((torch.ones_like(h).norm() / h.norm()).item())


def test_events_name_the_call_and_the_whole_chain() -> None:
    cell = nn.Linear(2, 2)

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(self.cell(x))

    net = Loop()
    with collect(net) as seen, rewrite(net, {"cell:output.grad": [halve, third]}):
        net(torch.ones(1, 2)).sum().backward()
    assert [(event.name, event.text) for event in seen.events_of("rewrite")] == [
        ("cell#2:output.grad", "halve"),
        ("cell#2:output.grad", "third"),
        ("cell:output.grad", "halve"),
        ("cell:output.grad", "third"),
    ]


def test_a_run_folder_keeps_the_events(tmp_path: Path) -> None:
    net, x = make_net(), torch.randn(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rg.record(net, tmp_path / "run"), rewrite(net, {"1:output.grad": rg_clip(1e-3), "3:output": leave}):
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    run = rg.open_run(tmp_path / "run")
    events = [event for event in run.history.events if event.kind == "rewrite"]
    assert [(event.moment.step, event.name, event.text) for event in events] == [
        (step, "1:output.grad", "ClipNorm(max_norm=0.001)") for step in range(3)
    ]
    assert all(event.value is not None and 0.9 < event.value < 1 for event in events)


def rg_clip(norm: float) -> Any:
    return rg.rules.ClipNorm(norm)  # type: ignore[attr-defined]


def test_rules_under_loss_scaling_are_recorded_without_the_scale() -> None:
    net, x = make_net(), torch.randn(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with collect(net, sites=["1:output.grad", "1:output.before.grad"]) as seen, rewrite(net, {"1:output.grad": third}):
        scaler.scale(net(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    (event,) = seen.events_of("rewrite")
    assert event.value == pytest.approx(2 / 3)
    net = make_net()
    h = torch.tanh(net[0](x))
    h.retain_grad()
    net[2:](h).sum().backward()
    assert h.grad is not None
    assert seen.one("1:output.grad").abs_sum == pytest.approx(h.grad.abs().sum().item() / 3)
    assert seen.one("1:output.before.grad").abs_sum == pytest.approx(h.grad.abs().sum().item())


def test_recording_begun_and_ended_in_the_middle() -> None:
    net, x = make_net(), torch.randn(5, 3)
    with rewrite(net, {"1:output.grad": third}):
        plain = net(x)
        with collect(net, sites=["1:output.grad"]) as seen:
            net(x).sum().backward()
        net.zero_grad()
        plain.sum().backward()
    h = torch.tanh(net[0](x))
    h.retain_grad()
    net[2:](h).sum().backward()
    assert h.grad is not None
    assert seen.one("1:output.grad").abs_sum == pytest.approx(h.grad.abs().sum().item() / 3)


@pytest.mark.parametrize("order", ORDERS)
def test_a_pass_that_the_rules_refuse_is_over_for_the_recorder(order: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.flat = nn.Linear(3, 4), nn.Flatten(0)
            self.writes = True

        def forward(self, x: Tensor) -> Tensor:
            h = self.flat(self.linear(x))
            return h.mul_(2) if self.writes else h * 2

    net, x = Net(), torch.randn(2, 3)
    with both(order, net, {"flat:output.grad": third}, **EVERYTHING) as seen:
        with pytest.raises(CannotRewriteError):
            net(x).sum().backward()
        net.writes = False
        net(x).sum().backward()
    rows = seen.all("flat:output.grad")
    assert [row.max for row in rows if row.phase == "train"] == [pytest.approx(2 / 3)]
