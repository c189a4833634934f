import math

import numpy as np

from retrograd.explaining.findings.detectors.schedule import (
    count_waves,
)

COSINE = [0.05 * (1 + math.cos(math.pi * step / 100)) for step in range(100)]


def test_waves_are_counted_by_hand() -> None:
    assert count_waves(np.array([1.0, 0.0, 1.0, 0.0, 1.0])) == 2
    assert count_waves(np.array(COSINE)) == 0
