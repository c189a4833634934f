"""Models that torch does not run as Python."""

from __future__ import annotations

import pytest

from tests.launch.conftest import Record
from tests.launch.recorded import outputs, parameters

WEIGHTS = parameters("body.linear", "head")


@pytest.mark.parametrize(
    ("what", "seen"),
    [
        pytest.param("model", outputs("self"), id="torch.compile(model)"),
        pytest.param("in-place", outputs("self"), id="model.compile()"),
        pytest.param("part", outputs("body", "head", "self"), id="model.body.compile()"),
        pytest.param("function", set(), id="torch.compile(function)"),
    ],
)
def test_what_is_compiled_is_recorded_at_its_boundary(record: Record, what: str, seen: set[str]) -> None:
    outcome = record("compiled.py", what)  # which compares what both print, the number of graphs among it
    assert outcome.output.split()[-2:] == ["1", "graphs"]
    assert outcome.sites() == seen | WEIGHTS
    assert len({step for step, _ in outcome.moments()}) >= 29  # the first step may be over before the model is found


def test_a_scripted_model_is_recorded_at_its_root(record: Record) -> None:
    outcome = record("scripted.py")
    assert outcome.sites() == outputs("self") | parameters("body.0", "head")
    assert outcome.moments() == [(step, 0) for step in range(3)]
