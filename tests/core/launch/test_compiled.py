"""Models that torch does not run as Python."""

from __future__ import annotations

import pytest

from tests.core.launch.recorded import Command, Outcome, outputs, parameters, recorded, steps

WEIGHTS = parameters("body.linear", "head")
OUTPUTS = outputs("body.linear", "body", "head", "self")


@pytest.mark.parametrize(
    ("outcome", "seen"),
    [
        pytest.param(Command("compiled.py model"), OUTPUTS, id="torch.compile(model)"),
        pytest.param(Command("compiled.py in-place"), OUTPUTS, id="model.compile()"),
        pytest.param(Command("compiled.py part"), OUTPUTS, id="model.body.compile()"),
        pytest.param(Command("compiled.py function"), OUTPUTS, id="torch.compile(function)"),
    ],
    indirect=["outcome"],
)
def test_compiled_models_are_recorded_inside(outcome: Outcome, seen: set[str]) -> None:
    assert outcome.output.split()[-2:] == ["1", "graphs"]  # as without us, or there would be no outcome
    assert outcome.sites() == seen | WEIGHTS
    assert len({step for step, _ in outcome.moments()}) >= 29  # the first step may be over before the model is found


@recorded("scripted.py")
def test_a_scripted_model_is_recorded_at_its_root(outcome: Outcome) -> None:
    assert outcome.sites() == outputs("self") | parameters("body.0", "head")
    assert outcome.moments() == steps(3)


@recorded("exports.py")
def test_strict_exports_are_as_without_us(outcome: Outcome) -> None:
    """The graphs and values on stdout are compared with a bare run; all steps are recorded, of exports nothing."""
    assert outcome.code == 0
    assert outcome.words[-1].startswith("retrograd: recorded 27 steps")
    weights = [row for row in outcome.rows() if row["site"] in ("net.0:weight.grad", "0:weight.grad")]
    assert [row["step"] for row in weights] == list(range(27))
