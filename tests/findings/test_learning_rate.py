from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.findings.births import Births
from retrograd.findings.record import CannotTell, Record
from retrograd.history.facts import Call, NonFinite, OptimizerMade, Parameter
from retrograd.history.sink import Moment
from tests.findings.by_hand import ask, check, make_record, spread


def make_run(
    losses: Callable[[int], float],
    ratio: Callable[[int], float],
    steps: int = 60,
    rate: float | None = None,
    optimizer: str = "SGD",
) -> Record:
    """A weight of norm 10 that is changed by a ratio of it."""
    made = OptimizerMade(name=f"{optimizer}#1", value=1, line="train.py:7", groups=({"lr": rate},))
    return make_record(
        range(steps),
        lambda step: {"0:weight.grad": spread(1.0), "0:weight.update": spread(10 * ratio(step))},
        losses,
        weights=lambda step: {"0:weight": 10.0},
        facts=[] if rate is None else [made],
        optimizer=optimizer,
    )


def test_a_loss_that_explodes_behind_a_large_update() -> None:
    record = make_run(lambda step: 0.7 if step < 5 else 90.0, lambda step: 0.01 if step < 4 else 2.0, rate=3.0)
    [found] = ask("learning-rate-too-high", record)
    assert (found.severity, found.step, found.line) == ("critical", 4, "train.py:7")
    assert "rate of 3 is" in found.message
    assert "2 times" in found.message


def test_a_loss_that_is_no_longer_finite() -> None:
    record = make_run(lambda step: 5.0 * 10.0**step if step < 9 else np.nan, lambda step: 1.0 if step < 9 else np.nan)
    [found] = ask("learning-rate-too-high", record)
    assert found.step == 0
    assert "no longer finite" in found.message


@pytest.mark.parametrize(("scale", "is_said"), [(1.0, False), (65536.0, True)])
def test_a_rate_is_too_high_for_a_loss_that_is_large_itself(scale: float, *, is_said: bool) -> None:
    record = make_run(
        lambda step: scale * (2.3 if step < 5 else 90.0), lambda step: 0.01 if step < 4 else 2.0, rate=0.1
    )
    [found] = ask("learning-rate-too-high", record)
    assert ("is too high for a loss of " in found.message) == is_said
    assert ("Look why the loss is so large" in found.repair) == is_said


@pytest.mark.parametrize(
    ("losses", "ratio"),
    [
        (lambda step: 0.7 if step != 30 else 90.0, lambda step: 0.5 if step == 29 else 0.01),  # it came back
        (lambda step: 0.7 if step < 30 else 90.0, lambda step: 0.01),  # a usual update: it was the data
        (lambda step: 9.0 / (step + 1), lambda step: 3.0 / (step + 1)),  # large steps that help
        (lambda step: 0.7 + 0.1 * (step % 3), lambda step: 0.3),  # noise
    ],
)
def test_rates_that_are_not_too_high(losses: Callable[[int], float], ratio: Callable[[int], float]) -> None:
    assert not ask("learning-rate-too-high", make_run(losses, ratio))


def test_a_rate_that_grows_after_the_loss_has_fallen() -> None:
    record = make_run(lambda step: 4.0 * 0.9**step if step < 40 else 2.0**step, lambda step: 1e-3 * 1.15**step)
    [found] = ask("learning-rate-too-high", record)
    assert found.step == 33  # 1e-3 · 1.15³³ > 0.1


def test_an_infinity_that_a_logarithm_makes_is_not_blamed_on_the_rate() -> None:
    made = NonFinite(
        name="", value=1, born="forward", line="train.py:4", operation="log", reason="log of 0", moment=Moment(3)
    )
    record = make_record(
        range(60),
        lambda step: {"0:weight.grad": spread(1.0), "0:weight.update": spread(2.0 if step < 3 else 0.01)},
        lambda step: 80.0 - step if step < 3 else np.inf,
        weights=lambda step: {"0:weight": 10.0},
        facts=[made],
    )
    assert record.once(Births).is_sudden
    assert not ask("learning-rate-too-high", record)


def test_a_nan_that_is_born_in_a_gradient_is_no_rate() -> None:
    record = make_run(lambda step: 0.7 if step < 10 else np.nan, lambda step: 0.01 if step < 9 else np.nan)
    assert not ask("learning-rate-too-high", record)


def test_models_that_train_against_each_other_are_not_judged() -> None:
    record = make_record(
        range(30),
        lambda step: {"G.0:weight.update": spread(5.0), "D.0:weight.update": spread(5.0)},
        lambda step: 0.7 * 2.0**step,
        weights=lambda step: {"G.0:weight": 1.0, "D.0:weight": 1.0},
        modules={"G": "Sequential", "G.0": "Linear", "D": "Sequential", "D.0": "Linear"},
    )
    for event in [each for each in record.history.events if each.kind == "update"]:
        record.history.add_event(event)  # the second model's
    record = Record(record.history)
    with pytest.raises(CannotTell, match="several models"):
        check("learning-rate-too-high", record)


def test_updates_that_come_to_nothing() -> None:
    [found] = ask("learning-rate-too-low", make_run(lambda step: 0.69, lambda step: 1e-7, rate=1e-8, optimizer="Adam"))
    assert found.severity == "warning"
    assert "1e-08 is too low" in found.message
    assert "6e-06" in found.message


@pytest.mark.parametrize(
    ("losses", "ratio", "rate"),
    [
        (lambda step: 0.69, lambda step: 1e-7, 0.1),  # the gradients are small, not the rate
        (lambda step: 9.0 / (step + 1), lambda step: 1e-7, 1e-8),  # it trains
        (lambda step: 0.69, lambda step: 1e-3, 1e-8),  # the weights are small
        (lambda step: 0.69, lambda step: 0.0, 0.0),  # another fault
    ],
)
def test_rates_that_are_not_too_low(losses: Callable[[int], float], ratio: Callable[[int], float], rate: float) -> None:
    assert not ask("learning-rate-too-low", make_run(losses, ratio, rate=rate))


def test_a_warm_up_is_not_too_low() -> None:
    steps = [Call(name="step", about="SGD#1", details={"lr": [1e-8 * (k + 1)]}, moment=Moment(k)) for k in range(60)]
    made = OptimizerMade(name="SGD#1", groups=({"lr": 1e-8},))
    record = make_record(
        range(60),
        lambda step: {"0:weight.update": spread(1e-7)},
        lambda step: 0.69,
        weights=lambda step: {"0:weight": 1.0},
        facts=[made, *steps],
    )
    assert not ask("learning-rate-too-low", record)


def test_without_a_rate_it_cannot_be_told() -> None:
    with pytest.raises(CannotTell, match="no learning rate"):
        check("learning-rate-too-low", make_run(lambda step: 0.69, lambda step: 1e-7))


def test_a_weight_that_stays_as_it_is() -> None:
    record = make_record(
        range(10),
        lambda step: {
            "0:weight.grad": spread(1.0), "2:weight.grad": spread(1.0),
            "0:weight.update": spread(0.0), "2:weight.update": spread(0.1),
        },
        weights=lambda step: {"0:weight": 1.0, "2:weight": 1.0},
    )  # fmt: skip
    [found] = ask("not-updated", record)
    assert (found.site, found.line) == ("0:weight", "train.py:1")


@pytest.mark.parametrize(("gradient", "update"), [(0.0, 0.0), (1e-9, 0.0), (1.0, 1e-6)])
def test_weights_that_are_rightly_still(gradient: float, update: float) -> None:
    record = make_record(
        range(10),
        lambda step: {
            "0:weight.grad": spread(gradient), "2:weight.grad": spread(1.0),
            "0:weight.update": spread(update), "2:weight.update": spread(0.1),
        },
        weights=lambda step: {"0:weight": 1.0, "2:weight": 1.0},
    )  # fmt: skip
    assert not ask("not-updated", record)


def test_a_group_without_a_rate_is_meant() -> None:
    record = make_record(
        range(10),
        lambda step: {
            "0:weight.grad": spread(1.0), "2:weight.grad": spread(1.0),
            "0:weight.update": spread(0.0), "2:weight.update": spread(0.1),
        },
        weights=lambda step: {"0:weight": 1.0, "2:weight": 1.0},
        facts=[OptimizerMade(name="SGD#1", groups=({"lr": 0.0, "parameters": ("0:weight",)}, {"lr": 0.1}))],
    )  # fmt: skip
    assert not ask("not-updated", record)


def test_weights_that_are_put_back() -> None:
    def make(digests: list[str]) -> Record:
        looks = [
            Parameter(name="0:weight", value=1.0, shape=(16,), digest=digest, moment=Moment(step))
            for step, digest in enumerate(digests)
        ]
        return make_record(
            range(10),
            lambda step: {"0:weight.grad": spread(1.0), "0:weight.update": spread(0.1)},
            weights=lambda step: {"0:weight": 1.0},
            facts=looks,
        )

    [found] = ask("not-updated", make(["a", "a", "a", "a"]))
    assert found.severity == "critical"
    assert "writes old values back" in found.message
    assert not ask("not-updated", make(["a", "b", "c", "d"]))
    staged = make(["a", "a", "a", "a"])
    staged.manifest["split"] = {"ranks": [], "stages": {"": 0}}
    assert not ask("not-updated", staged)  # another rank trains its own copy of it
    staged.facts.append(OptimizerMade(name="SGD#1", groups=({"parameters": ["0:weight"]},)))
    assert ask("not-updated", staged)


def _thaw_at_8(step: int) -> dict[str, np.ndarray]:
    head = {"2:weight.grad": spread(1.0), "2:weight.update": spread(0.1)}
    return head | ({"0:weight.grad": spread(1.0), "0:weight.update": spread(0.1)} if step >= 8 else {})


@pytest.mark.parametrize("late", [[], [12]])
def test_weights_that_were_frozen_until_the_last_look_are_not_put_back(late: list[int]) -> None:
    record = make_record(
        range(16),
        _thaw_at_8,
        weights=lambda step: {"0:weight": 1.0, "2:weight": 1.0},
        facts=[
            Parameter(name="0:weight", value=1.0, shape=(16,), digest="a", moment=Moment(step))
            for step in [0, 1, 2, 4, 8, *late]
        ],
    )
    assert not ask("not-updated", record)


def test_weights_that_are_put_back_once_they_are_thawed() -> None:
    record = make_record(
        range(16),
        _thaw_at_8,
        weights=lambda step: {"0:weight": 1.0, "2:weight": 1.0},
        facts=[
            Parameter(
                name="0:weight", value=1.0, shape=(16,), digest="a" if step >= 8 else "as made", moment=Moment(step)
            )
            for step in [0, 4, 8, 10, 12, 16]
        ],
    )
    [found] = ask("not-updated", record)
    assert "writes old values back" in found.message


def test_a_layer_that_is_thawed_is_not_put_back_while_this_is_recorded() -> None:
    torch.manual_seed(0)
    first = nn.Linear(6, 6)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    first.requires_grad_(False)
    before = first.weight.detach().clone()
    with rg.record(model) as recording:
        for step in range(16):
            if step == 8:
                assert torch.equal(before, first.weight)
                first.requires_grad_(True)
            optimizer.zero_grad()
            model(torch.randn(32, 6)).square().mean().backward()
            optimizer.step()
        assert not torch.equal(before, first.weight)
        assert "not-updated" not in {found.detector for found in rg.explain(recording)}
