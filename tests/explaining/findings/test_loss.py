import numpy as np

from retrograd.core.history.curve import Curve
from retrograd.explaining.findings.detectors.loss import (
    find_spikes,
    longest_stretch,
    thin,
)

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
