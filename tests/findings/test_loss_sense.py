from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd.findings.record import Record
from retrograd.history.facts import Input, NonFinite
from retrograd.history.sink import Moment
from tests.findings.by_hand import ask, detector_of, make_record
from tests.findings.programs import make_chain, make_optimizer, make_program

RANDOM = np.random.default_rng(0)


def _regression(activation: str, output: np.ndarray, target: np.ndarray) -> Record:
    """A mean squared error, with the gradient that it has by its formula."""
    gradient = 2 * (output - target) / output.size
    chain = make_chain(
        ("linear", (-1, -1), ((8, 6), (1, 6)), (8, 1)),
        (activation, (0,), ((8, 1),), (8, 1), "", "1"),
        ("mse_loss", (1, -1), ((8, 1), (8, 1)), (), "reduction=mean"),
        outputs=[1],
    )
    sites = {"self:output": output, "self:output.grad": gradient}
    return make_record(range(5), lambda step: sites, facts=[chain])


def test_targets_below_a_relu() -> None:
    output = np.maximum(RANDOM.normal(size=64), 0)
    target = RANDOM.normal(size=64) * 3
    [found] = ask("relu-on-output", _regression("relu", output, target))
    assert (found.severity, found.site, found.line) == ("critical", "1", "train.py:2")
    assert "cannot be below 0" in found.message
    assert target.min() <= float(found.evidence[0].value) < 0  # there is such a target
    assert found.evidence[1].value == pytest.approx(target.mean())


def test_targets_above_a_sigmoid() -> None:
    output = RANDOM.uniform(0.2, 0.8, 64)
    target = RANDOM.normal(5, 1, 64)
    [found] = ask("relu-on-output", _regression("sigmoid", output, target))
    assert "cannot be above 1" in found.message
    assert 1 < float(found.evidence[0].value) <= target.max()


@pytest.mark.parametrize(
    ("activation", "low", "high"), [("relu", 0, 4), ("sigmoid", 0, 1), ("tanh", -1, 1), ("linear", -5, 5)]
)
def test_targets_within_reach(activation: str, low: float, high: float) -> None:
    output, target = RANDOM.uniform(low, high, 64), RANDOM.uniform(low, high, 64)
    assert not ask("relu-on-output", _regression(activation, output, target))


def test_targets_are_not_known_of_other_losses() -> None:
    record = make_program([make_chain(
        ("sigmoid", (-1,), ((8, 1),), (8, 1)), ("l1_loss", (0, -1), ((8, 1), (8, 1)), ()), outputs=[0],
    )])  # fmt: skip
    assert not ask("relu-on-output", record)


MSE = ("mse_loss", (0, -1), ((8, 1), (8, 1)), (), "reduction=mean")
LINEAR = ("linear", (-1, -1), ((8, 6), (1, 6)), (8, 1))


def test_a_loss_that_is_negated() -> None:
    chain = make_chain(LINEAR, MSE, ("neg", (1,), ((),), ()), outputs=[0])
    [found] = ask("loss-wrong-sign", make_program([make_optimizer(), chain], [-1.0, -1.5, -2.0, -4.0, -9.0]))
    assert (found.severity, found.line) == ("critical", "train.py:32")
    assert "negative of mse_loss" in found.message


@pytest.mark.parametrize(
    ("last", "wrong"),
    [
        ([("add", (0, 2), ((), ()), ()), ("neg", (3,), ((),), ())], True),  # −(mse + 0.1 kl)
        ([("sub", (2, 0), ((), ()), ()), ("neg", (3,), ((),), ())], False),  # mse − …: one of each sign
        ([("neg", (0,), ((),), ()), ("sub", (3, 2), ((), ()), ())], True),  # −mse − 0.1 kl
        ([("neg", (0,), ((),), ()), ("sub", (3, 2), ((), ()), ()), ("neg", (4,), ((),), ())], False),  # of an ELBO
        ([("add", (0, 2), ((), ()), ()), ("mul", (3,), ((),), (), "-0.5")], True),
        ([("sub", (0, 2), ((), ()), ()), ("mul", (3,), ((),), (), "2")], False),
    ],
)
def test_the_signs_within_a_sum(last: list[tuple[Any, ...]], wrong: bool) -> None:
    terms = [("mse_loss", (-1, -1), ((8, 1), (8, 1)), ()), ("kl_div", (-1, -1), ((8, 3), (8, 3)), ()),
             ("mul", (1,), ((),), (), "0.1")]  # fmt: skip
    record = make_program([make_chain(*terms, *last, outputs=())], losses=[-1.0, -2.0, -5.0, -9.0])
    assert len(ask("loss-wrong-sign", record)) == wrong


def test_a_likelihood_without_its_minus() -> None:
    chain = make_chain(
        LINEAR,
        ("log_softmax", (0,), ((8, 3),), (8, 3), "dim=1"),
        ("getitem", (1,), ((8, 3),), (8,), "(tensor, tensor)"),
        ("mean", (2,), ((8,),), ()),
        outputs=[0],
    )
    [found] = ask("loss-wrong-sign", make_program([make_optimizer(), chain], [-1.0, -1.5, -2.0, -4.0, -9.0]))
    assert "without a minus" in found.message


def test_an_optimizer_that_maximises() -> None:
    chain = make_chain(LINEAR, MSE, outputs=[0])
    [found] = ask("loss-wrong-sign", make_program([make_optimizer(maximize=True), chain], [1.0, 1.5, 2.0, 4.0, 9.0]))
    assert "The optimizer maximises mse_loss" in found.message


def test_losses_of_the_right_sign() -> None:
    negated = make_chain(LINEAR, MSE, ("neg", (1,), ((),), ()), outputs=[0])
    falling, rising = [-1.0, -1.5, -2.0, -4.0, -9.0], [1.0, 0.8, 0.6, 0.4, 0.2]
    plain = make_chain(LINEAR, MSE, outputs=[0])
    likelihood = make_chain(
        ("log_softmax", (-1,), ((8, 3),), (8, 3)), ("mean", (0,), ((8, 3),), ()), ("neg", (1,), ((),), ()), outputs=[0],
    )  # fmt: skip
    for facts, losses in (
        ([make_optimizer(), plain], rising),
        ([make_optimizer(), make_optimizer("Adam#2"), negated], falling),
        ([make_optimizer(maximize=True), negated], falling),
        ([make_optimizer(), likelihood], rising),
    ):
        assert not ask("loss-wrong-sign", make_program(facts, losses))


SUM = make_chain(LINEAR, ("mse_loss", (0, -1), ((8, 1), (8, 1)), (), "reduction=sum"), outputs=[0])
FALLING, RISING = [8.0 * 0.9**step for step in range(20)], [8.0 * 1.1**step for step in range(20)]


def test_a_sum_that_is_too_steep() -> None:
    [found] = ask("loss-reduction-sum", make_program([make_optimizer(), SUM], RISING))
    assert "sums over [8, 1], so gradients are 8 times those of the mean" in found.message
    assert not ask("loss-reduction-sum", make_program([make_optimizer(), SUM], FALLING))
    assert not ask("loss-reduction-sum", make_program([make_optimizer("Adam#1"), SUM], RISING))
    assert not ask("loss-reduction-sum", make_program([make_optimizer(), make_chain(LINEAR, MSE, outputs=[0])], RISING))


def test_a_sum_whose_loss_is_lost() -> None:
    """By steps that grow, which follows from the sum; or by a logarithm of 0, which does not."""

    def lose(reason: str, sizes: list[float]) -> Record:
        born = NonFinite(name="0", born="forward", operation="log", reason=reason, moment=Moment(19))
        return make_record(
            range(20), lambda step: {"0:output": np.full(4, sizes[step]), "0:weight.update": np.full(4, 1e-3)},
            [*RISING[:19], np.nan], weights=lambda step: {"0:weight": 1.0}, facts=[make_optimizer(), SUM, born],
        )  # fmt: skip

    [found] = ask("loss-reduction-sum", lose("overflow of float32", [10.0**step for step in range(20)]))
    assert "nan-forward" in detector_of("loss-reduction-sum").explains
    assert found.step == 0
    assert not ask("loss-reduction-sum", lose("log of 0", [1.0] * 20))


def _input(mean: float, std: float, low: float, high: float, dtype: str = "float32") -> Callable[[int], Input]:
    return lambda step: Input(
        name="self:input.x", value=mean, std=std, min=low, max=high, shape=(8, 6), dtype=dtype, moment=Moment(step)
    )


CLASSES = make_chain(
    ("linear", (-1, -1), ((8, 6), (3, 6)), (8, 3)), ("cross_entropy", (0, -1), ((8, 3), "int64[8]"), ()), outputs=[0],
)  # fmt: skip


def test_inputs_that_are_not_scaled() -> None:
    bytes_ = _input(120.0, 80.0, 0.0, 255.0)
    [found] = ask("input-unscaled", make_program([CLASSES, bytes_(0), bytes_(1)], [40.0, 20.0, 1.4, 1.3, 1.2, 1.1]))
    assert "mean 120 and standard deviation 80" in found.message
    assert "no better than guessing (1.1)" in found.message  # log 3


def test_inputs_that_do_no_harm() -> None:
    bytes_, small = _input(120.0, 80.0, 0.0, 255.0), _input(0.0, 1.0, -3.0, 3.0)
    flat = [1.1] * 10
    normed = make_chain(
        ("layer_norm", (-1,), ((8, 6),), (8, 6)), ("linear", (0, -1), ((8, 6), (3, 6)), (8, 3)),
        ("cross_entropy", (1, -1), ((8, 3), "int64[8]"), ()), outputs=[1],
    )  # fmt: skip
    for facts, losses in (
        ([CLASSES, bytes_(0)], [4.0, 1.0, 0.3, 0.2, 0.1, 0.1]),
        ([CLASSES, small(0)], flat),
        ([normed, bytes_(0)], flat),
        ([CLASSES, _input(120.0, 80.0, 0.0, 255.0, "int64")(0)], flat),
    ):
        assert not ask("input-unscaled", make_program(facts, losses))


def _far(error: float, losses: list[float], name: str = "mse_loss") -> Record:
    """A regression whose outputs are within ±0.5."""
    chain = make_chain(
        ("linear", (-1, -1), ((8, 6), (1, 6)), (8, 1)),
        (name, (0, -1), ((8, 1), (8, 1)), (), "reduction=mean"),
        outputs=[0],
    )
    sites = {"self:output": np.linspace(-0.5, 0.5, 8)}
    return make_record(range(len(losses)), lambda step: sites, [error * each for each in losses], facts=[chain])


def test_targets_that_are_not_scaled() -> None:
    flat = [1.0, 0.99, 0.98, 0.99, 0.97, 0.96]
    [found] = ask("input-unscaled", _far(4e10, flat))
    assert "off by 200,000 in mse_loss" in found.message  # √4e10
    assert found.line == "train.py:31"
    [found] = ask("input-unscaled", _far(3e4, flat, "l1_loss"))
    assert "off by 30,000 in l1_loss" in found.message


def test_targets_that_do_no_harm() -> None:
    assert not ask("input-unscaled", _far(4e10, [1.0, 0.5, 0.3, 0.2, 0.1, 0.1]))  # it learns
    assert not ask("input-unscaled", _far(2500.0, [1.0] * 6))  # off by 50


def test_inputs_of_a_run_that_is_lost() -> None:
    bytes_ = _input(120.0, 80.0, 0.0, 255.0)
    losses = [40.0, 20.0, np.nan, np.nan]

    def born(kind: str, reason: str) -> NonFinite:
        return NonFinite(name="", born=kind, operation="log", reason=reason, moment=Moment(2))

    def ask_of(fact: NonFinite) -> list[str]:
        found = ask("input-unscaled", make_program([CLASSES, bytes_(0), bytes_(1), fact], losses))
        return [each.severity for each in found]

    assert ask_of(born("forward", "log of 0")) == ["critical"]
    assert ask_of(born("input", "")) == []
    assert ask_of(born("forward", "softmax over a row that is all −inf")) == []
