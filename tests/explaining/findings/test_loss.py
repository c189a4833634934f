from collections.abc import Callable

import numpy as np
import pytest

from retrograd.core.history.curve import Curve
from retrograd.core.history.history import History
from retrograd.core.history.sink import Event, Moment
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.detectors.loss import (
    find_spikes,
    longest_stretch,
    thin,
)
from retrograd.explaining.findings.record import Record
from tests.explaining.findings.by_hand import detector_of

NOISE = 1 + 0.1 * np.sin(np.arange(200) * 2.4)


def jump(losses: np.ndarray, at: int, length: int, times: float) -> np.ndarray:
    out = losses.copy()
    out[at : at + length] *= times
    return out


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


def find_diverged(losses: np.ndarray) -> list[Finding]:
    history = History()
    for step, value in enumerate(losses.tolist()):
        history.add_event(Event(Moment(step, 0, 0), "loss", value=value))
    return list(detector_of("diverged").check(Record(history)))


@pytest.mark.parametrize(
    "draw",
    [
        lambda generator, count: np.exp(generator.standard_normal(count)),
        lambda generator, count: np.exp(0.2 * generator.standard_normal(count) + 2.3 * (generator.random(count) < 0.3)),
        lambda generator, count: generator.chisquare(4, count),
        lambda generator, count: generator.exponential(size=count),
    ],
    ids=["lognormal", "two levels", "squared errors", "exponential"],
)
def test_noise_around_one_level_has_not_diverged_and_one_that_rises_has(
    draw: Callable[[np.random.Generator, int], np.ndarray],
) -> None:
    """One in 150 runs, which do not learn, may be said to have diverged; by their medians alone many would."""
    generator, runs, naive = np.random.default_rng(0), 150, 0
    said = rose = 0
    for _ in range(runs):
        losses = draw(generator, 60)
        naive += bool(np.median(losses[-12:]) > 3 * min(losses[0], np.median(losses[:6])))
        said += bool(find_diverged(losses))
        losses[20:] *= 1e4
        rose += bool(find_diverged(losses))
    assert said <= 1
    assert naive > 4
    assert rose == runs
