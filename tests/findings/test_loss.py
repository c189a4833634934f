from collections.abc import Sequence

import numpy as np
import pytest

from retrograd.findings.detectors.loss import (
    find_spikes,
    longest_stretch,
    thin,
)
from retrograd.findings.record import Record
from retrograd.history.fact import Fact
from retrograd.history.matrix import Curve
from tests.findings.by_hand import ask, make_record, spread

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
    [found] = ask("diverged", make_loss(jump(NOISE, 120, 80, 50.0)))
    assert (found.severity, found.step) == ("warning", 120)
    [found] = ask("diverged", make_loss(jump(NOISE, 120, 80, np.nan)))
    assert found.step == 120


@pytest.mark.parametrize("losses", [NOISE, jump(NOISE, 120, 3, 50.0), -NOISE, jump(NOISE[:5], 2, 3, 50.0)])
def test_losses_that_do_not_diverge(losses: np.ndarray) -> None:
    assert not ask("diverged", make_loss(losses))


def test_a_jump_that_does_not_come_back_is_the_batch() -> None:
    [found] = ask("loss-spike", make_loss(jump(NOISE, 120, 80, 50.0)))
    assert (found.severity, found.step) == ("warning", 120)
    [found] = ask("loss-spike", make_loss(jump(NOISE, 120, 8, 50.0)))
    assert (found.severity, found.step, found.last_step) == ("note", 120, 127)


def test_healthy_spikes() -> None:
    assert not ask("loss-spike", make_loss(jump(NOISE, 120, 2, 50.0)))
    assert not ask("loss-spike", make_loss(NOISE * np.linspace(5, 1, 200)))
    falling = 100 * 0.95 ** np.arange(200)
    assert not ask("loss-spike", make_loss(jump(falling, 150, 9, 20.0)))  # small beside its begin


def test_a_flat_loss_claims_no_cause() -> None:
    [found] = ask("loss-flat", make_loss(NOISE))
    assert (found.severity, found.step) == ("note", None)
    assert not ask("loss-flat", make_loss(NOISE * np.linspace(1, 0.5, 200)))
    assert not ask("loss-flat", make_loss(NOISE[:30]))


def test_a_loss_that_fell_at_once_is_not_flat() -> None:
    """As of flow matching: most of it is noise that no model can learn, and the rest is learned in a few steps."""
    matching = 1.6 * NOISE
    matching[:5] += [1.0, 0.9, 0.8, 0.6, 0.3]
    assert not ask("loss-flat", make_loss(matching))
    matching[:5] -= [1.0, 0.9, 0.8, 0.6, 0.3]
    assert ask("loss-flat", make_loss(matching))


LINEAR = ("linear", (-1, -1), ((8, 6), (4, 6)), (8, 4))


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
