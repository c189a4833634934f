"""A simulation decides as the live rule decided on the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.errors import NoSuchSiteError, RuleError
from retrograd.core.history.history import History
from retrograd.core.history.sink import Moment
from retrograd.rewriting.rules import (
    AGC,
    AdaGC,
    AutoClip,
    ClipNorm,
    ClipValue,
    EmaClip,
    NormRule,
    PCGrad,
    Rule,
    SiteState,
    SkipStep,
    SpikeClip,
    ZClip,
)
from retrograd.rewriting.rules.simulation import simulate_rule
from tests.core.history.made import make_batch
from tests.rewriting.rules import references

STEPS = 40


class Net(nn.Module):
    """Two linear layers, the second called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.again = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.again(torch.tanh(self.first(x))))
        return self.again(y)


class Trained:
    """A run with spikes and a NaN, its recording, and every gradient by hand."""

    def __init__(self, folder: Path, micros: int = 1) -> None:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.gradients: dict[str, list[Tensor]] = {}
        self.weights: list[Tensor] = []
        names = {name.replace(".", ":") + ".grad": parameter for name, parameter in model.named_parameters()}
        tensors = rg.Keep(["*:weight.grad", "*:weight"], copy=True)
        with rg.record(model, folder, sites=["*:*.grad", "*:weight"], tensors=tensors):
            for step in range(STEPS):
                optimizer.zero_grad()
                for _ in range(micros):
                    x = torch.randn(8, 4) * (200.0 if step in (17, 31) else 1.0)
                    output = model(x)
                    output.register_hook(lambda gradient: self.add("again#2:output.grad", gradient))
                    loss = output.square().mean() * (float("nan") if step == 23 else 1.0)
                    self.weights.append(model.first.weight.detach().clone())
                    handles = [
                        parameter.register_hook(lambda gradient, name=name: self.add(name, gradient))
                        for name, parameter in names.items()
                    ]
                    loss.backward()
                    for handle in handles:
                        handle.remove()
                if step == 23:
                    for parameter in model.parameters():
                        parameter.grad.zero_()
                optimizer.step()
        self.run = rg.open_run(folder)

    def add(self, name: str, gradient: Tensor) -> None:
        self.gradients.setdefault(name, []).append(gradient.clone())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("runs") / "run")


def live(rule: Rule, gradients: list[Tensor], values: list[Tensor] | None = None) -> list[tuple[float, float]]:
    """The norms before and after, of the rule as it is used in training."""
    state, results = rule.state_at("live"), []
    for step, gradient in enumerate(gradients):
        state.step = step
        state.value = values[step] if values else None
        result = rule(gradient, state)
        results.append((float(gradient.norm()), float((gradient if result is None else result).norm())))
    return results


def column(table: pa.Table, name: str, site: str) -> np.ndarray:
    return np.array([row[name] for row in table.to_pylist() if row["site"] == site])


RULES: list[Callable[[], Rule]] = [
    lambda: ClipNorm(0.05),
    lambda: AutoClip(50.0),
    lambda: AutoClip(90.0, 10),
    lambda: ZClip(warmup=10),
    lambda: ZClip(warmup=10, max_norm=None, option="mean"),
    lambda: AdaGC(warmup=10),
    EmaClip,
    lambda: ClipValue(0.01),
    lambda: SpikeClip(threshold=50.0, rest=5),
]


@pytest.mark.parametrize("make", RULES)
def test_a_simulation_is_what_the_live_rule_did(make: Callable[[], Rule], trained: Trained) -> None:
    simulated = simulate_rule(make(), trained.run, "*:weight.grad")
    for site in ("first:weight.grad", "again:weight.grad"):
        expected = np.array(live(make(), trained.gradients[site]))
        np.testing.assert_array_equal(column(simulated.table, "step", site), np.arange(STEPS))
        np.testing.assert_allclose(column(simulated.table, "before", site), expected[:, 0], rtol=1e-6)
        np.testing.assert_allclose(column(simulated.table, "after", site), expected[:, 1], rtol=1e-5)
        acted = column(simulated.table, "acted", site)
        moved = np.abs(expected[:, 1] / expected[:, 0] - 1) > 1e-6
        np.testing.assert_array_equal(acted & ~np.isnan(expected[:, 0]), moved & ~np.isnan(expected[:, 0]))
        assert acted.any()


def test_a_step_that_would_be_skipped(trained: Trained) -> None:
    site = "first:weight.grad"
    simulated = simulate_rule(SkipStep(size=8), trained.run, site)
    skipped = references.skip_step([float(gradient.norm()) for gradient in trained.gradients[site]], size=8)
    assert simulated.steps.tolist() == np.flatnonzero(skipped).tolist()
    assert {17, 23} <= set(simulated.steps.tolist())
    assert column(simulated.table, "after", site)[[17, 23]].tolist() == [0, 0]
    assert column(simulated.table, "change", site)[[16, 17, 23]].tolist() == [0, 1, 1]


@pytest.mark.parametrize("make", [lambda: ClipNorm(0.05), lambda: ZClip(warmup=10), lambda: SkipStep(size=16)])
def test_together_all_gradients_are_one_vector(make: Callable[[], NormRule], trained: Trained) -> None:
    sites = [site for site in trained.gradients if site.endswith((":weight.grad", ":bias.grad"))]
    simulated = simulate_rule(make(), trained.run, sites, together=True)
    vectors = [torch.cat([trained.gradients[site][step].flatten() for site in sites]) for step in range(STEPS)]
    expected = np.array(live(make(), vectors))
    np.testing.assert_allclose(simulated.table["before"].to_numpy(), expected[:, 0], rtol=1e-6)
    np.testing.assert_allclose(simulated.table["after"].to_numpy(), expected[:, 1], rtol=1e-5)
    assert set(simulated.table["site"].to_pylist()) == {"together"}


def test_calls_of_a_module_share_one_memory_and_come_as_in_the_backward_pass(trained: Trained) -> None:
    seen = []

    class Watching(NormRule):
        def scale(self, norm: Tensor, state: SiteState) -> Tensor:
            seen.append((state.site, state.step, state.call, float(norm)))
            return torch.ones_like(norm)

    simulate_rule(Watching(), trained.run, "again*:output.grad")
    assert [entry[:3] for entry in seen[:4]] == [
        ("again:output.grad", step, call) for step in (0, 1) for call in (2, 1)
    ]
    expected = [float(gradient.norm()) for gradient in trained.gradients["again#2:output.grad"]]
    np.testing.assert_allclose([entry[3] for entry in seen if entry[2] == 2], expected, rtol=1e-6)


def test_a_rule_that_needs_the_value_gets_that_of_the_same_call(trained: Trained) -> None:
    simulated = simulate_rule(AGC(0.05), trained.run, "first:weight.grad")
    expected = np.array(live(AGC(0.05), trained.gradients["first:weight.grad"], trained.weights))
    np.testing.assert_allclose(column(simulated.table, "after", "first:weight.grad"), expected[:, 1], rtol=1e-5)


def test_the_rule_itself_is_left_as_it_was(trained: Trained) -> None:
    rule = ZClip(warmup=3)
    live(rule, trained.gradients["first:weight.grad"])
    before = copy.deepcopy(rule.state_dict())
    first, again = simulate_rule(rule, trained.run, "*:weight.grad"), simulate_rule(rule, trained.run, "*:weight.grad")
    assert str(first) == str(again)
    assert str(before) == str(rule.state_dict())


def test_gradients_of_micro_batches_come_one_by_one_and_cannot_be_joined(tmp_path: Path) -> None:
    trained = Trained(tmp_path / "run", micros=2)
    simulated = simulate_rule(AutoClip(50.0), trained.run.history, "first:weight.grad")
    expected = np.array(live(AutoClip(50.0), trained.gradients["first:weight.grad"]))
    np.testing.assert_allclose(simulated.table["after"].to_numpy(), expected[:, 1], rtol=1e-5)
    assert simulated.table["micro"].to_pylist()[:4] == [0, 1, 0, 1]
    with pytest.raises(RuleError, match="several backward passes"):
        simulate_rule(AutoClip(), trained.run, "*:weight.grad", together=True)


def test_each_rank_has_a_memory_of_its_own() -> None:
    history = History()
    parts = []
    for rank, size in ((0, 1.0), (1, 100.0)):
        one = History(rank=rank)
        one.add_sites(["a:output.grad"])
        for step in range(5):
            one.add_rows(make_batch(Moment(step, 0, 0), {0: np.array([size])}))
        parts += one.rows.parts
    history.load(one._names, parts, history.all_events, lambda site: [])
    simulated = simulate_rule(AutoClip(), history, "a:output.grad")
    assert simulated.table["rank"].to_pylist() == [0] * 5 + [1] * 5
    assert not simulated.table["acted"].to_numpy().any()
    assert str(simulated).endswith("nothing would have changed")


def test_what_it_prints(trained: Trained) -> None:
    simulated = simulate_rule(ClipNorm(0.05), trained.run, ["*:weight.grad", "*:bias.grad"])
    lines = str(simulated).splitlines()
    assert lines[0] == "ClipNorm(max_norm=0.05), steps 0 to 39"
    assert "acted" in lines[1]
    assert "most at step" in lines[1]
    changes = {
        site: column(simulated.table, "change", site).max(initial=0) for site in trained.gradients if ":" in site
    }
    del changes["again#2:output.grad"]
    acted = [line.split()[0] for line in lines[1:] if "acted" in line]
    assert acted == sorted((site for site in changes if changes[site] > 0), key=lambda site: -changes[site])
    assert repr(simulated).startswith("Simulation(ClipNorm(max_norm=0.05): acted on ")
    assert len(simulated) == 4 * STEPS


def test_what_was_not_recorded_is_missed(tmp_path: Path, trained: Trained) -> None:
    model = Net()
    with rg.record(model, tmp_path / "run", sites="*:output.grad"):
        model(torch.randn(2, 4)).sum().backward()
    run = rg.open_run(tmp_path / "run")
    assert len(simulate_rule(ClipNorm(1.0), run, "*:output.grad")) == 4  # the model's own too
    with pytest.raises(RuleError, match=r"what it needs was not recorded.*\n.*tensors='again#1:output.grad'"):
        simulate_rule(ClipValue(1.0), run, "again:output.grad")
    with pytest.raises(RuleError, match="does not act on all sites"):
        simulate_rule(ClipValue(1.0), run, "*:output.grad", together=True)
    with pytest.raises(RuleError, match="cannot be simulated"):
        simulate_rule(PCGrad(), run, "*:output.grad")
    with pytest.raises(RuleError, match="is not a rule"):
        simulate_rule(ClipNorm, run, "*:output.grad")  # type: ignore[arg-type]
    with pytest.raises(RuleError, match="has no history"):
        simulate_rule(ClipNorm(1.0), model, "*:output.grad")  # type: ignore[arg-type]
    with pytest.raises(NoSuchSiteError):
        simulate_rule(ClipNorm(1.0), run, "nowhere:output.grad")
    with pytest.raises(RuleError, match=r"'first:bias'"):
        simulate_rule(AGC(), keep_bias_gradients(tmp_path / "other"), "first:bias.grad")


def keep_bias_gradients(folder: Path) -> History:
    model = Net()
    with rg.record(model, folder, sites="*:bias.grad", tensors="*:bias.grad"):
        model(torch.randn(2, 4)).sum().backward()
    return rg.open_run(folder).history


def test_a_simulation_on_what_arrived_is_what_was_recorded_of_the_live_rule(tmp_path: Path) -> None:
    """The events of a run with the rule, and the simulation of the rule on the gradients before it, of that run."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    sites = ["first:output.before.grad", "first:output.grad"]
    with rg.record(model, tmp_path / "run", sites=sites), rg.rewrite(model, {"first:output.grad": ZClip(warmup=5)}):
        for step in range(STEPS):
            optimizer.zero_grad()
            (model(torch.randn(8, 4)).square().mean() * (300.0 if step == 20 else 1.0)).backward()
            optimizer.step()
    history = rg.open_run(tmp_path / "run").history
    simulated = simulate_rule(ZClip(warmup=5), history, "first:output.before.grad")
    acted = [event.moment.step for event in history.events if event.kind == "rewrite"]
    assert simulated.steps.tolist() == acted
    assert 20 in acted
    np.testing.assert_allclose(simulated.table["after"].to_numpy(), history["first:output.grad"].l2, rtol=1e-5)
    changes = {event.moment.step: event.value for event in history.events if event.kind == "rewrite"}
    for row in simulated.table.to_pylist():
        assert row["change"] == pytest.approx(changes.get(row["step"], 0.0), rel=1e-3, abs=1e-6)
