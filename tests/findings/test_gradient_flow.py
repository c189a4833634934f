from collections.abc import Sequence

import numpy as np
import pytest

from retrograd.findings.record import CannotTell, Record
from tests.findings.by_hand import ask, check, make_record, spread

FLAT = [0.7] * 20
FALLING = [0.7 * 0.9**step for step in range(20)]


def make_deep(norms: Sequence[float], losses: Sequence[float] = FLAT) -> Record:
    """Linear layers, the first one nearest to the input, with these norms of their outputs' gradients."""
    count = len(norms)
    forward = {f"{k}:output": spread(4.0) for k in range(count)}
    backward = {f"{k}:output.grad": spread(norms[k]) for k in reversed(range(count))}
    weights = {f"{k}:weight.grad": spread(1.0) for k in range(count)}
    modules = {"self": "Sequential"} | {str(k): "Linear" for k in range(count)}
    return make_record(range(len(losses)), lambda step: forward | backward | weights, losses, modules=modules)


def test_a_gradient_that_falls_at_each_layer() -> None:
    [found] = ask("vanishing", make_deep([1e-8, 1e-6, 1e-4, 1e-2, 1.0]))
    assert (found.severity, found.site, found.line) == ("warning", "0:output", "train.py:1")
    assert "falls to 0.01 of itself at each of 5 layers" in found.message
    assert not ask("exploding", make_deep([1e-8, 1e-6, 1e-4, 1e-2, 1.0]))


def test_a_gradient_that_grows_at_each_layer() -> None:
    [found] = ask("exploding", make_deep([1e6, 1e4, 1e2, 1.0]))
    assert (found.severity, found.site) == ("critical", "0:output")
    assert "grows 100 times at each of 4 layers" in found.message


@pytest.mark.parametrize(
    ("norms", "losses"),
    [
        ([1e-8, 1e-6, 1e-4, 1e-2, 1.0], FALLING),  # it trains
        ([0.5, 1e-6, 1e-6, 1e-6, 1.0], FLAT),  # branches that begin at zero, beside a residual path
        ([1e-6, 1e-6, 1e-6, 1.0, 1.0], FLAT),  # a single layer makes it
        ([0.1, 0.2, 0.4, 0.6, 1.0], FLAT),
        ([0.0, 0.0, 0.0, 0.0, 1.0], FLAT),  # frozen, or zero-initialised
    ],
)
def test_gradients_that_do_not_vanish(norms: Sequence[float], losses: Sequence[float]) -> None:
    assert not ask("vanishing", make_deep(norms, losses))
    assert not ask("exploding", make_deep(norms[::-1], losses))


def test_calls_of_one_module() -> None:
    forward = {f"cell#{call}:output": spread(4.0) for call in range(1, 9)}
    backward = {f"cell#{call}:output.grad": spread(10.0 ** (call - 8)) for call in range(8, 0, -1)}
    sites = forward | backward | {"cell:weight.grad": spread(1.0)}
    record = make_record(range(20), lambda step: sites, FLAT, modules={"self": "M", "cell": "RNNCell"})
    [found] = ask("vanishing", record)
    assert found.site == "cell#1:output.grad"
    assert "8 calls of cell" in found.message


def test_two_layers_are_no_depth() -> None:
    with pytest.raises(CannotTell, match="fewer than 4 layers"):
        check("vanishing", make_deep([1e-9, 1.0]))


def test_gradients_behind_a_nan_do_not_count() -> None:
    def sites(step: int) -> dict[str, np.ndarray]:
        scale = 1.0 if step == 0 else np.nan
        names = {f"{k}:output": spread(1.0) for k in range(4)}
        names |= {f"{k}:output.grad": spread(10.0 ** (-2 * k)) * scale for k in reversed(range(4))}
        return names | {f"{k}:weight.grad": spread(1.0) for k in range(4)}

    modules = {"self": "Sequential"} | {str(k): "Linear" for k in range(4)}
    record = make_record(range(9), sites, [5.0] + [np.nan] * 8, modules=modules)
    assert len(ask("exploding", record)) == 1
