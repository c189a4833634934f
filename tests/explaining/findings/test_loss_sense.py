import numpy as np
import pytest

from retrograd.explaining.findings.record import Record
from tests.explaining.findings.by_hand import ask, make_record
from tests.explaining.findings.programs import make_chain

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
