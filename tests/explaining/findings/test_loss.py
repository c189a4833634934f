from collections.abc import Sequence

import numpy as np
import pytest

from retrograd.core.history.fact import Fact
from retrograd.core.history.matrix import Curve
from retrograd.explaining.findings.detectors.loss import (
    Diverged,
    LossFlat,
    LossNoisy,
    LossSpike,
    find_spikes,
    longest_stretch,
    thin,
)
from retrograd.explaining.findings.record import Record
from tests.explaining.findings.by_hand import ask, make_record, spread
from tests.explaining.findings.programs import make_chain

NOISE = 1 + 0.1 * np.sin(np.arange(200) * 2.4)


def make_loss(losses: np.ndarray, ratio: float = 0.001, facts: Sequence[Fact] = ()) -> Record:
    return make_record(
        range(len(losses)),
        lambda step: {"0:weight.update": spread(ratio)},
        [float(each) for each in losses],
        weights=lambda step: {"0:weight": 1.0},
        facts=facts,
    )


def jump(losses: np.ndarray, at: int, length: int, times: float) -> np.ndarray:
    out = losses.copy()
    out[at : at + length] *= times
    return out


def test_a_loss_that_diverges() -> None:
    [found] = ask(Diverged, make_loss(jump(NOISE, 120, 80, 50.0)))
    assert (found.severity, found.step) == ("warning", 120)
    [found] = ask(Diverged, make_loss(jump(NOISE, 120, 80, np.nan)))
    assert found.step == 120


@pytest.mark.parametrize("losses", [NOISE, jump(NOISE, 120, 3, 50.0), -NOISE, jump(NOISE[:5], 2, 3, 50.0)])
def test_losses_that_do_not_diverge(losses: np.ndarray) -> None:
    assert not ask(Diverged, make_loss(losses))


def test_a_jump_that_does_not_come_back_is_the_batch() -> None:
    [found] = ask(LossSpike, make_loss(jump(NOISE, 120, 80, 50.0)))
    assert (found.severity, found.step) == ("warning", 120)
    [found] = ask(LossSpike, make_loss(jump(NOISE, 120, 8, 50.0)))
    assert (found.severity, found.step, found.last_step) == ("note", 120, 127)


def test_healthy_spikes() -> None:
    assert not ask(LossSpike, make_loss(jump(NOISE, 120, 2, 50.0)))
    assert not ask(LossSpike, make_loss(NOISE * np.linspace(5, 1, 200)))
    falling = 100 * 0.95 ** np.arange(200)
    assert not ask(LossSpike, make_loss(jump(falling, 150, 9, 20.0)))  # small beside its begin


def test_a_flat_loss_claims_no_cause() -> None:
    [found] = ask(LossFlat, make_loss(NOISE))
    assert (found.severity, found.step) == ("note", None)
    assert not ask(LossFlat, make_loss(NOISE * np.linspace(1, 0.5, 200)))
    assert not ask(LossFlat, make_loss(NOISE[:30]))


def test_a_loss_that_fell_at_once_is_not_flat() -> None:
    """As of flow matching: most of it is noise that no model can learn, and the rest is learned in a few steps."""
    matching = 1.6 * NOISE
    matching[:5] += [1.0, 0.9, 0.8, 0.6, 0.3]
    assert not ask(LossFlat, make_loss(matching))
    matching[:5] -= [1.0, 0.9, 0.8, 0.6, 0.3]
    assert ask(LossFlat, make_loss(matching))


LINEAR = ("linear", (-1, -1), ((8, 6), (4, 6)), (8, 4))


@pytest.mark.parametrize(
    ("listed", "outputs", "is_judged"),
    [
        ([LINEAR, ("mse_loss", (0, -1), ((8, 4), (8, 4)), ())], [0], True),
        ([LINEAR, ("mul", (0, -1), ((8, 4), (4,)), (8, 4)), ("mse_loss", (1, -1), ((8, 4), (8, 4)), ())], [1], True),
        ([LINEAR, ("mse_loss", (0, -1), ((8, 4), (8, 4)), ()), ("mul", (1, -1), ((), ()), ())], [0], True),
        (
            [LINEAR, ("detach", (0,), ((8, 4),), (8, 4), "", "", True), ("mse_loss", (0, 1), ((8, 4), (8, 4)), ())],
            [0],
            False,
        ),
        (
            [
                LINEAR,
                ("cross_entropy", (0, -1), ((8, 4), "int64[8]"), (8,), "reduction=none"),
                ("mul", (1, -1), ((8,), (8,)), (8,)),
                ("mean", (2,), ((8,),), ()),
            ],
            [0],
            False,
        ),
    ],
    ids=["regression", "scaled inside", "scaled", "moving target", "weighted samples"],
)
def test_a_loss_whose_aim_moves_is_not_judged(listed: list[tuple], outputs: list[int], is_judged: bool) -> None:
    chain = make_chain(*listed, outputs=outputs)
    assert bool(ask(LossFlat, make_loss(NOISE, facts=[chain]))) == is_judged


def test_a_loss_that_swings() -> None:
    swing = np.where(np.arange(200) % 2, 3.0, 0.1) * NOISE
    [found] = ask(LossNoisy, make_loss(swing))
    assert found.severity == "note"
    assert not ask(LossNoisy, make_loss(NOISE))


def test_spikes_and_stretches() -> None:
    high = find_spikes(jump(NOISE, 50, 4, 9.0))
    assert np.flatnonzero(high).tolist() == [50, 51, 52, 53]
    assert longest_stretch(high) == (50, 4)
    assert longest_stretch(np.zeros(5, np.bool_)) == (0, 0)


def test_long_curves_are_thinned() -> None:
    steps = np.arange(12_000)
    thinned = thin(Curve(steps, np.where(steps % 3 == 1, 100.0, steps.astype(np.float64))))
    assert thinned.steps.tolist() == list(range(0, 12_000, 3))
    assert thinned.values[-1] == np.median([11_997, 100, 11_999])
    short = Curve(steps[:50], NOISE[:50])
    assert thin(short) is short
