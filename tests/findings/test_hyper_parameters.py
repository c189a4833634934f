from typing import Any

import numpy as np
import pytest

from retrograd.findings.record import CannotTell, Record
from retrograd.history.facts import Call, OptimizerMade
from retrograd.history.sink import Moment
from tests.findings.by_hand import ask, check, make_record, spread

FLAT = [0.7] * 40
FALLING = [0.7 * 0.9**step for step in range(40)]


def make_decay(
    decay: float, gradient: float, losses: list[float] = FLAT, *, shrinks: bool = True, **group: Any
) -> Record:
    """A weight of norm 10 that loses a tenth of itself at each step, and the norm of its gradient."""
    factor = 0.9 if shrinks else 1.0
    made = OptimizerMade(
        name="SGD#1",
        line="train.py:5",
        groups=({"lr": 0.1, "weight_decay": decay, "parameters": ("0:weight",)} | group,),
    )
    return make_record(
        range(40),
        lambda step: {"0:weight.grad": spread(gradient), "0:weight.update": spread(10 * factor**step * (1 - factor))},
        losses,
        weights=lambda step: {"0:weight": 10 * factor**step},
        facts=[made],
    )


def test_decay_beside_the_gradient() -> None:
    [found] = ask("weight-decay-dominates", make_decay(1.0, 0.1))
    assert (found.site, found.line) == ("SGD#1", "train.py:5")
    assert "from 10 to 0.164 at step 39" in found.message


def test_decoupled_decay_beside_the_update() -> None:
    assert len(ask("weight-decay-dominates", make_decay(1.0, 9e9, decoupled_weight_decay=True))) == 1
    assert not ask("weight-decay-dominates", make_decay(0.01, 9e9, decoupled_weight_decay=True))


def test_decay_that_is_meant() -> None:
    assert not ask("weight-decay-dominates", make_decay(5e-4, 0.1))
    assert not ask("weight-decay-dominates", make_decay(1.0, 0.1, FALLING))
    assert not ask("weight-decay-dominates", make_decay(1.0, 0.1, shrinks=False))
    assert not ask("weight-decay-dominates", make_decay(0.0, 0.1))


def make_epsilon(epsilon: float, gradient: float, update: float, losses: list[float] = FLAT) -> Record:
    made = OptimizerMade(name="Adam#1", groups=({"lr": 1e-3, "eps": epsilon},))
    sites = {"0:weight.grad": spread(4 * gradient), "0:weight.update": spread(4 * update)}
    return make_record(range(40), lambda step: sites, losses, facts=[made], optimizer="Adam")


def test_an_epsilon_that_rules() -> None:
    [found] = ask("adam-epsilon", make_epsilon(10.0, 1e-3, 1e-7))
    assert "ε of Adam#1 is 10, and its gradients are 0.001" in found.message


def test_an_epsilon_that_does_not() -> None:
    assert not ask("adam-epsilon", make_epsilon(1e-8, 1e-3, 1e-3))
    assert not ask("adam-epsilon", make_epsilon(1e-4, 1e-3, 1e-3))
    assert not ask("adam-epsilon", make_epsilon(10.0, 1e-3, 1e-3))  # the updates are large all the same
    assert not ask("adam-epsilon", make_epsilon(0.05, 1e-3, 1e-7, FALLING))
    assert len(ask("adam-epsilon", make_epsilon(10.0, 1e-3, 1e-7, FALLING))) == 1  # no recipe has such a one
    assert not ask("adam-epsilon", make_epsilon(1e-8, 1e-12, 1e-7))


def make_momentum(losses: list[float], **group: Any) -> Record:
    made = OptimizerMade(name="SGD#1", line="train.py:5", groups=({"lr": 0.1} | group,))
    return make_record(range(40), lambda step: {"0:weight.update": spread(0.1)}, losses, facts=[made])


def test_momentum_that_lasts_longer_than_the_run() -> None:
    [found] = ask("momentum", make_momentum(FLAT[:20] + [2.0] * 20, momentum=0.999))
    assert "1000 steps" in found.message
    assert len(ask("momentum", make_momentum(FALLING, betas=(0.999, 0.9)))) == 1  # swapped


@pytest.mark.parametrize(
    ("losses", "group"),
    [
        (FLAT, {"momentum": 0.9}),
        (FLAT, {"momentum": 0.99}),
        (FLAT, {"betas": (0.9, 0.999)}),
        (FLAT, {"betas": (0.9, 0.95)}),
        (FLAT, {"betas": (0.0, 0.9)}),
        (FLAT, {"momentum": 0.999, "dampening": 0.999}),
        (FALLING, {"momentum": 0.999}),
    ],
)
def test_usual_momentum(losses: list[float], group: dict[str, Any]) -> None:
    assert not ask("momentum", make_momentum(losses, **group))


def make_clipped(norms: np.ndarray, bound: float, losses: list[float] = FLAT, optimizer: str = "SGD") -> Record:
    calls = [
        Call(name="clip_grad_norm_", line="train.py:8", value=float(n), details={"max_norm": bound}, moment=Moment(k))
        for k, n in enumerate(norms)
    ]
    sites = {"0:weight.update": spread(0.1)}
    return make_record(range(40), lambda step: sites, losses, facts=calls, optimizer=optimizer)


def test_clipping_to_next_to_nothing() -> None:
    [found] = ask("clip-always-on", make_clipped(np.full(40, 2.0), 1e-3))
    assert (found.severity, found.line) == ("warning", "train.py:8")
    assert "leaves 0.0005 of the gradient at 40 of 40 steps" in found.message
    [found] = ask("clip-always-on", make_clipped(np.full(40, 2.0), 1e-3, FALLING))
    assert found.severity == "note"
    [found] = ask("clip-always-on", make_clipped(np.full(40, 2.0), 1e-3, optimizer="Adam"))
    assert found.severity == "note"


def test_clipping_that_is_meant() -> None:
    assert not ask("clip-always-on", make_clipped(np.full(40, 2.0), 1.0))
    assert not ask("clip-always-on", make_clipped(np.where(np.arange(40) < 20, 2e3, 0.5), 1.0))  # at the begin
    with pytest.raises(CannotTell, match="it takes 20"):
        check("clip-always-on", make_clipped(np.full(5, 2.0), 1e-3))
