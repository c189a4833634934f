from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from retrograd.core.errors import FeatureError
from retrograd.tools.features.conversion import describe_pool, find_pool

AXES = {(4,): (), (4, 3): (), (4, 5, 3): (1,), (4, 3, 5, 6): (2, 3), (4, 3, 2, 5, 6): (2, 3, 4)}


@pytest.mark.parametrize("shape", AXES)
def test_what_is_kept_is_batch_and_channels(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape, dtype=torch.float64)
    mean, largest = find_pool("mean"), find_pool("max")
    assert mean is not None
    assert largest is not None
    np.testing.assert_allclose(mean(value).numpy(), value.numpy().mean(axis=AXES[shape]), rtol=1e-12)
    assert np.array_equal(largest(value).numpy(), value.numpy().max(axis=AXES[shape]))


def test_integers_have_a_mean_too() -> None:
    mean = find_pool("mean")
    assert mean is not None
    assert mean(torch.tensor([[[1], [2]]])).tolist() == [[1.5]]


def test_what_stands_for_no_pool() -> None:
    assert find_pool(None) is None
    for wrong in ("median", 3, ["mean"]):
        with pytest.raises(FeatureError, match="not a valid pool"):
            find_pool(wrong)


@pytest.mark.parametrize(
    ("pool", "text"), [(None, None), ("mean", "mean"), (torch.relu, "relu"), (np.mean, "numpy.mean")]
)
def test_how_a_pool_is_written_down(pool: Any, text: str | None) -> None:
    described = describe_pool(pool)
    assert described == text or (text is not None and str(described).endswith(text))
