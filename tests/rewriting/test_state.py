"""What rules remember: saved with a checkpoint, loaded into another model or process, refused if it is of others."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.errors import RetrogradError, RetrogradWarning, RewriteError
from retrograd.rewriting.rewriting import Rewriting, rewrite
from retrograd.rewriting.rules.clipping import ClipNorm
from retrograd.rewriting.rules.norm_rule import NormRule
from retrograd.rewriting.rules.rule import Rule, SiteState
from tests import warm
from tests.rewriting.models import assert_same, make_net, weights


class Running(Rule):
    """Everything that it does follows from what it has seen."""

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        size = value.detach().abs().mean()
        state.ema("size", 0.7).add(size)
        state.window("size", 3).add(size)
        state.last("tensor", 2).add(value.detach())
        state.put("count", state.get("count", 0) + 1)
        return value / (1 + state.ema("size", 0.7).value + state.window("size", 3).mean) * (1 + 0.01 * state.step)


class RunningNorm(NormRule):
    def scale(self, norm: Tensor, state: SiteState) -> Tensor:
        average = state.ema("norm", 0.5)
        average.add(norm)
        return 1 / (1 + average.value)


SITES = ["1:output", "1:output.grad", "2:input.input.grad", "2:weight", "2:weight.grad", "4:bias.grad"]


class Training:
    """A run that can be stopped and resumed."""

    def __init__(self) -> None:
        self.net = make_net()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.02)
        self.rules = rewrite(self.net, {site: Running() for site in SITES})
        self.joint = rewrite(self.optimizer, RunningNorm())
        self.step = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(self.step))
            self.optimizer.zero_grad()
            self.net(x).square().mean().backward()
            self.optimizer.step()
            self.step += 1

    def checkpoint(self) -> dict[str, Any]:
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rules": self.rules.state_dict(),
            "joint": self.joint.state_dict(),
            "step": self.step,
        }

    def resume(self, saved: dict[str, Any]) -> None:
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.rules.load_state_dict(saved["rules"])
        self.joint.load_state_dict(saved["joint"])
        self.step = saved["step"]

    def end(self) -> dict[str, Tensor]:
        self.rules.remove()
        self.joint.remove()
        return weights(self.net)


def uninterrupted(steps: int) -> dict[str, Tensor]:
    whole = Training()
    whole.run(steps)
    return whole.end()


@pytest.mark.parametrize("ran_before", [0, 2])
def test_resumed_in_another_model(tmp_path: Path, ran_before: int) -> None:
    """Also in one whose rules have acted already."""
    first = Training()
    first.run(3)
    torch.save(first.checkpoint(), tmp_path / "c.pt")
    first.run(1)  # what is saved does not change any more
    first.end()
    second = Training()
    second.run(ran_before)
    second.resume(torch.load(tmp_path / "c.pt", weights_only=True))
    assert second.rules.step == 3
    second.run(3)
    assert_same(second.end(), uninterrupted(6))


def test_without_the_state_it_would_differ(tmp_path: Path) -> None:
    first = Training()
    first.run(3)
    saved = first.checkpoint()
    first.end()
    second = Training()
    second.resume({**saved, "rules": Training.checkpoint(fresh := Training())["rules"]})
    fresh.end()
    second.run(3)
    assert not all(
        torch.equal(one, other) for one, other in zip(second.end().values(), uninterrupted(6).values(), strict=True)
    )


_SCRIPT = """
import sys, torch
from tests.rewriting.test_state import Training
torch.set_num_threads(1)
training = Training()
training.resume(torch.load(sys.argv[1], weights_only=True))
training.run(3)
torch.save(training.end(), sys.argv[2])
"""


@pytest.mark.slow
def test_resumed_in_another_process(tmp_path: Path) -> None:
    first = Training()
    first.run(3)
    torch.save(first.checkpoint(), tmp_path / "c.pt")
    first.end()
    root = Path(__file__).parents[2]
    warm.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path / "c.pt"), str(tmp_path / "w.pt")],
        cwd=root,
        check=True,
        timeout=120,
    )
    assert_same(torch.load(tmp_path / "w.pt", weights_only=True), uninterrupted(6))


def test_one_rule_at_several_sites_remembers_each_by_itself() -> None:
    rule, net = Running(), make_net()
    with rewrite(net, {"0:output": rule, "1:output": rule}) as rewriting:
        net(torch.randn(5, 3))
        assert rule.state_at("0:output").get("count") == 1
        saved = rewriting.state_dict()
    assert len(saved["rules"]) == 1
    assert saved["rules"][0][1].keys() == {"0:output", "1:output"}


def make_calls() -> nn.Module:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"once": self.cell(x), "twice": self.cell(self.cell(x))}

    return Twice()


@pytest.mark.parametrize(
    "pattern",
    ["cell#2:output", "self:output.twice", "re:^cell.*grad$", lambda site: site.site.slot == "input", "*:parameters"],
)
def test_a_state_of_the_same_sites_is_loaded_without_a_word(pattern: Any) -> None:
    net, rule = make_calls(), Running()
    with rewrite(net, {pattern: rule}) as rewriting:
        net(torch.randn(2, 3))["twice"].sum().backward()
        saved = rewriting.state_dict()
    assert any(saved["rules"][0][1].values())
    with warnings.catch_warnings(action="error"), rewrite(make_calls(), {pattern: Running()}) as rewriting:
        rewriting.load_state_dict(saved)


def test_a_memory_of_other_sites_is_warned_of() -> None:
    net = make_net()
    with rewrite(net, {"1:output": Running()}) as rewriting:
        net(torch.randn(5, 3))
        saved = rewriting.state_dict()
    for model, pattern in ((net, "0:output"), (net[0], "*:output")):
        with (
            rewrite(model, {pattern: Running()}) as rewriting,
            pytest.warns(RetrogradWarning, match=r"Running\(\) at 1:output, where these"),
        ):
            rewriting.load_state_dict(saved)


def test_a_rule_of_its_own_may_be_loaded_by_itself() -> None:
    rule, net = Running(), make_net()
    with rewrite(net, {"1:output": rule}):
        net(torch.randn(5, 3))
        saved = rule.state_dict()
        net(torch.randn(5, 3))
        rule.load_state_dict(saved)
        assert rule.state_at("1:output").get("count") == 1
        net(torch.randn(5, 3))
        assert rule.state_at("1:output").get("count") == 2


@pytest.mark.parametrize(
    "saved",
    [
        {},
        None,
        3,
        {"step": 1},
        {"step": 1, "rules": []},
        {"step": 1, "rules": [("ClipNorm(max_norm=2.0)", {})]},
        {"step": 1, "rules": [("ClipNorm(max_norm=1.0)", {}), ("ClipNorm(max_norm=1.0)", {})]},
    ],
)
def test_the_state_of_other_rules_is_refused(saved: Any) -> None:
    net = make_net()
    with rewrite(net, {"1:output": ClipNorm(1.0)}) as rewriting:
        with pytest.raises(RewriteError):
            rewriting.load_state_dict(saved)
        assert rewriting.step == 0


def scale(value: Tensor, state: SiteState, factor: float) -> Tensor:
    return value * factor


class Scaling:
    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        return value * 2


@pytest.mark.parametrize("make", [lambda: partial(scale, factor=2.0), Scaling, lambda: Scaling().__call__])
def test_functions_of_any_kind_are_the_same_in_another_run(make: Any) -> None:
    """Their names hold no addresses."""

    def saved() -> dict[str, Any]:
        with rewrite(nn.Linear(2, 2), {"self:output": make()}) as rewriting:
            return rewriting.state_dict()

    with rewrite(nn.Linear(2, 2), {"self:output": make()}) as rewriting:
        rewriting.load_state_dict(saved())
    (name,) = [name for name, _ in saved()["rules"]]
    assert "0x" not in name


def test_the_handle_says_what_it_is() -> None:
    net = make_net()
    rewriting = rewrite(net, {"1:output": ClipNorm(1.0)})
    assert isinstance(rewriting, Rewriting)
    assert "ClipNorm(max_norm=1.0)" in repr(rewriting)
    rewriting.remove()
    rewriting.remove()
    assert "removed" in repr(rewriting)
    with pytest.raises(RewriteError, match="were removed"):
        rewriting.__enter__()  # no rule would act
    assert issubclass(RewriteError, RetrogradError)


def test_steps_are_those_of_the_optimizer() -> None:
    seen: list[tuple[int, int, bool]] = []

    def note(value: Tensor, state: SiteState) -> None:
        seen.append((state.step, state.call, state.training))

    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rewrite(net, {"1:output.grad": note}):
        for _ in range(2):
            for _ in range(2):  # accumulation
                net(torch.randn(5, 3)).sum().backward()
            optimizer.step()
        net.eval()
        net(torch.randn(5, 3)).sum().backward()
    assert seen == [(0, 1, True)] * 2 + [(1, 1, True)] * 2 + [(2, 1, False)]
