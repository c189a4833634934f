"""Parameters: their values, the gradient of each pass, and what an optimizer adds; against float64 formulas."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.limits import LIMITS
from tests.core.recording.collector import collect
from tests.core.recording.oracle import assert_row

PARAMETERS = ["*:weight*", "*:bias*"]


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def take(net: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters, by site."""
    return {":".join(name.rsplit(".", 1)): p.detach().clone() for name, p in net.named_parameters()}


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam]
)
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}], ids=["single", "foreach"])
def test_the_update_is_what_the_weights_have_changed_by(optimizer: type, options: dict[str, bool]) -> None:
    net = make_net()
    trainer = optimizer(net.parameters(), lr=0.05, **options)
    states = [take(net)]
    gradients = []
    with collect(net, sites=PARAMETERS) as seen:
        for _ in range(3):
            train(net, trainer)
            states.append(take(net))
            gradients.append({name: net.get_parameter(name.replace(":", ".")).grad.clone() for name in states[0]})  # type: ignore[union-attr]
    for step in range(3):
        for name in states[0]:
            before, after = states[step][name], states[step + 1][name]
            change = after.double() - before.double()
            assert_row(seen.one(name, step=step), before)
            assert_row(seen.one(f"{name}.grad", step=step), gradients[step][name])
            row = seen.one(f"{name}.update", step=step)
            assert row.count == before.numel()
            assert row.l2 == pytest.approx(change.norm().item(), rel=1e-4)
            assert row.mean == pytest.approx(change.mean().item(), rel=1e-3, abs=1e-8)
            assert row.update_ratio == pytest.approx((change.norm() / before.double().norm()).item(), rel=1e-4)


def test_the_gradient_of_each_pass_is_seen_before_it_is_added() -> None:
    net = nn.Linear(2, 1, bias=False)
    with collect(net) as seen:
        for factor in (1.0, 3.0):
            net(torch.full((1, 2), factor)).sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.mean() == 4.0
    assert [(row.micro, row.mean) for row in seen.all("self:weight.grad")] == [(0, 1.0), (1, 3.0)]


def test_clipping_is_seen_in_the_update_and_not_in_the_gradient() -> None:
    net = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with collect(net) as seen:
        net(torch.full((1, 2), 100.0)).sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    assert seen.one("self:weight.grad").l2 == pytest.approx(100 * 2**0.5)
    assert seen.one("self:weight.update").l2 == pytest.approx(1.0, rel=1e-4)


def test_a_tied_parameter_is_recorded_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))

    net = Tied()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with collect(net) as seen:
        net(torch.tensor([1, 2])).square().sum().backward()
        gradient = net.embed.weight.grad.clone()  # type: ignore[union-attr]
        optimizer.step()
    row = seen.one("embed:weight.grad")
    assert row.count == 15  # one hook, after both uses were added up
    assert_row(row, gradient)
    assert not seen.all("head:weight.grad")
    reasons = {item["site"]: item["reason"] for item in seen.facts["not_recorded"]}
    assert reasons["head:weight.grad"] == reasons["head:weight.update"] == "the parameter is recorded as embed:weight"


def test_a_tied_parameter_can_be_asked_for_by_its_second_name() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    with collect(net, sites="1:weight.grad") as seen:
        net(torch.ones(1, 2)).sum().backward()
    assert seen.sites() == ["1:weight.grad"]


def test_frozen_parameters_are_told_and_recorded_once_they_thaw() -> None:
    net = make_net()
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with collect(net, sites=["0:weight", "0:output.grad", *PARAMETERS]) as seen:
        train(net, optimizer)
        net[0].requires_grad_(True)
        train(net, optimizer)
        gradient = net[0].weight.grad.clone()
        train(net, optimizer)
    assert [row.step for row in seen.all("2:weight.grad")] == [0, 1, 2]
    for site in ("0:weight.grad", "0:bias.grad", "0:weight.update", "0:output.grad"):
        assert [row.step for row in seen.all(site)] == [1, 2], site
    assert_row(seen.one("0:weight.grad", step=1), gradient)
    assert [row.step for row in seen.all("0:weight")] == [0, 1, 2]
    assert not seen.facts["not_recorded"]


def test_what_stays_frozen_is_told() -> None:
    net = make_net()
    net[0].requires_grad_(False)
    with collect(net) as seen:
        train(net, torch.optim.SGD(net.parameters(), lr=0.1))
    reasons = {item["site"]: item["reason"] for item in seen.facts["not_recorded"]}
    frozen = {f"0:{slot}.{quantity}" for slot in ("weight", "bias") for quantity in ("grad", "update")}
    assert {site for site, reason in reasons.items() if reason == "the parameter is frozen"} == frozen
    assert set(reasons) == {*frozen, "0:output.grad", "1:output.grad"}


def test_weights_beyond_the_limit_of_copies_are_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "copied_bytes", 80)  # bytes: all but the last bias are 80
    net = make_net()
    with collect(net) as seen:
        train(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert {site for site in seen.sites() if site.endswith("update")} == {
        "0:weight.update",
        "0:bias.update",
        "2:weight.update",
    }
    reasons = {item["site"]: item["reason"] for item in seen.facts["not_recorded"]}
    assert set(reasons) == {"2:bias.update"}
    assert "more bytes" in reasons["2:bias.update"]


def test_parameters_that_are_called_like_slots_are_told_from_them() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Parameter(torch.ones(7))
            self.grad = nn.Parameter(torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.output.sum() * self.grad.sum()

    net = Odd()
    with collect(net) as seen:
        net(torch.ones(2)).sum().backward()
    assert seen.one("self:output").count == 2
    assert seen.one("self:parameter.output.grad").count == 7
    assert seen.one('self:"grad".grad').count == 5


def test_each_update_is_an_event_that_counts() -> None:
    net = make_net()
    first = torch.optim.SGD(net[0].parameters(), lr=0.1)
    second = torch.optim.Adam(net[2].parameters(), lr=0.1)
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with collect(net) as seen:
        for step in range(3):
            net(torch.randn(8, 3)).sum().backward()
            first.step()
            stranger.step()
            if step != 1:
                second.step()
    told = [(event.moment.step, event.name, event.value) for event in seen.events_of("update")]
    assert told == [(0, "SGD", 1), (0, "Adam", 1), (1, "SGD", 2), (2, "SGD", 3), (2, "Adam", 2)]
    assert [row.step for row in seen.all("2:weight.update")] == [0, 2]


class Twice(torch.optim.SGD):
    """Steps two times with its parent's method, and may do something else then."""

    def step(self, closure: None = None, then: Callable[[], None] = lambda: None) -> None:  # type: ignore[override]
        super().step()
        super().step()
        then()


def test_an_optimizer_that_calls_its_parents_step_updates_once() -> None:
    net = make_net()
    torch.optim.SGD(net.parameters(), lr=0.1)  # torch puts its hooks into the class when the first one is made
    trainer = Twice(net.parameters(), lr=0.1)
    states = [take(net)]
    with collect(net) as seen:
        for _ in range(2):
            train(net, trainer)
            states.append(take(net))
    assert [(event.moment.step, event.value) for event in seen.events_of("update")] == [(0, 1), (1, 2)]
    for step in range(2):
        change = states[step + 1]["0:weight"] - states[step]["0:weight"]
        assert seen.one("0:weight.update", step=step).l2 == pytest.approx(change.norm().item(), rel=1e-4)


def test_an_optimizer_that_raises_can_step_again() -> None:
    net = make_net()
    trainer = Twice(net.parameters(), lr=0.1)

    def refuse() -> None:
        raise KeyboardInterrupt

    with collect(net) as seen:
        net(torch.randn(8, 3)).sum().backward()
        with pytest.raises(KeyboardInterrupt):
            trainer.step(then=refuse)
        train(net, trainer)
        train(net, trainer)
    assert [event.moment.step for event in seen.events_of("update")] == [0, 1]


def test_an_update_that_fails_to_be_measured_harms_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    net = make_net()

    def swap() -> None:
        net[0].bias.data = torch.zeros(5)

    trainer = Twice(net.parameters(), lr=0.1)
    with collect(net) as seen:
        net(torch.randn(8, 3)).sum().backward()
        trainer.step(then=swap)
    assert seen.one("0:weight.update").count == 12
    assert seen.one("2:bias.update").count == 1
    assert seen.facts["faults"] == {"0:bias.update": 1}
    assert capsys.readouterr().err.count("RetrogradWarning") == 1


def make_wide() -> nn.Sequential:
    """A weight whose copy waits for the next update, and a bias that is too small for that."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128))


def test_copies_that_wait_hold_the_newest_weights() -> None:
    model = make_wide()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    expected = []
    with rg.record(model) as recording:
        for _ in range(5):
            before = model[0].weight.detach().double().clone()
            model(torch.randn(4, 256)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            change = model[0].weight.detach().double() - before
            expected.append([change.pow(2).mean().sqrt().item(), before.norm().item()])
    series = recording.history["0:weight.update"]
    assert np.allclose(series.rms, [rms for rms, _ in expected], rtol=1e-4)
    sizes = [rms * np.sqrt(256 * 128) / norm for rms, norm in expected]
    assert np.allclose(series.update_ratio, sizes, rtol=1e-4)


def test_an_optimizer_within_another_has_copies_of_its_own() -> None:
    """As Lookahead: the outer update is what both have done, the inner one what it has done alone."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step()
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter += 1.0

    model = make_wide()
    optimizer = Outer(torch.optim.SGD(model.parameters(), lr=0.1))
    with rg.record(model) as recording:
        for _ in range(3):
            before = model[0].weight.detach().clone()
            model(torch.randn(4, 256)).sum().backward()
            gradient = model[0].weight.grad.clone()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            whole = model[0].weight.detach() - before
    rows = recording.history.table().to_pandas()
    rows = rows[(rows["site"] == "0:weight.update") & (rows["step"] == rows["step"].max())]
    total = (whole.double().sum() - 0.1 * gradient.double().sum()).item()
    assert rows["sum"].sum() == pytest.approx(total, rel=1e-4)


def test_a_weight_that_changes_its_size_between_updates() -> None:
    model = make_wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with rg.record(model, sites="0:weight.update") as recording:
        for width in (256, 256, 300, 256):
            model[0].weight.data = torch.zeros(128, width)
            optimizer.zero_grad(set_to_none=True)
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()
    assert recording.history["0:weight.update"].count.tolist() == [128 * w for w in (256, 256, 300, 256)]
    assert recording.history["0:weight.update"].mean.tolist() == [-0.5] * 4


def test_updates_alone_are_of_training_steps() -> None:
    model = make_wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    with rg.record(model, sites="*:weight.update") as recording:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 256)).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            model(torch.ones(1, 256))
    history = recording.history
    assert history["0:weight.update"].steps.tolist() == [0, 1, 2]
    assert history.loss.values.tolist() == losses
    assert set(history.table().to_pandas()["phase"]) == {"train"}


def test_no_copy_outlives_the_recording() -> None:
    model = make_wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = rg.record(model, sites="*:weight.update")
    for _ in range(2):
        train_wide(model, optimizer)
    assert count_copies(model[0].weight) == 1
    recording.close()
    assert count_copies(model[0].weight) == 0
    assert recording.history["0:weight.update"].steps.tolist() == [0, 1]


def train_wide(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def count_copies(weight: torch.Tensor) -> int:
    """Copies of this size that wait somewhere, or tensors of it besides the weight."""
    gc.collect()
    alive = gc.get_objects()
    kinds = (torch.Tensor, nn.Parameter)
    tensors = {each.data_ptr() for each in alive if type(each) in kinds and each.shape == weight.shape}
    rooms = [each for holder in alive if type(holder) is list for each in holder if type(each) is bytearray]
    return len(tensors) - 1 + len({id(each) for each in rooms if len(each) > weight.nbytes})
