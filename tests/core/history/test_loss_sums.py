"""Losses of each step, added up as they come, against sums by hand."""

from __future__ import annotations

import numpy as np
import pytest

from retrograd.core.history.events import Losses, LossSums


@pytest.mark.parametrize("seed", range(200))
def test_sums_are_those_by_hand(seed: int) -> None:
    random = np.random.default_rng(seed)
    sums, by_hand = LossSums(), dict[int, list[float]]()
    for _ in range(random.integers(1, 12)):
        n = int(random.integers(0, 6))
        steps, values = random.integers(0, 40, n), random.standard_normal(n)
        steps = np.sort(steps) if random.random() < 0.5 else steps
        sums.add(Losses(steps, values))
        for step, value in zip(steps.tolist(), values, strict=True):
            total = by_hand.setdefault(step, [0.0, 0.0])
            total[0] += value
            total[1] += 1.0
        if random.random() < 0.2:
            first = int(random.integers(0, 40))
            sums.cut(first)
            by_hand = {step: total for step, total in by_hand.items() if step < first}
    steps, values = sums.curve
    assert steps.tolist() == sorted(by_hand)
    assert values.tolist() == [by_hand[step][0] / by_hand[step][1] for step in sorted(by_hand)]
