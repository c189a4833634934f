from __future__ import annotations

import pytest

from retrograd.errors import PatternError, ScheduleError
from retrograd.launch.request import VARIABLE, Request, read_request

FULL = Request(
    path="/runs/x",
    shown="x",
    command=("torchrun", "train.py"),
    sites=("a*", "!b"),
    steps="log",
    tensors=("c",),
    histogram=False,
    resume=True,
)


@pytest.mark.parametrize("request_", [FULL, Request(path="/x", shown="x", command=())])
def test_a_request_travels_through_the_environment(request_: Request) -> None:
    assert read_request({VARIABLE: request_.write()}) == request_


def test_steps_are_a_schedule() -> None:
    third = Request(path="", shown="", command=(), steps=3).schedule
    assert [step for step in range(8) if third(step)] == [0, 3, 6]
    assert FULL.schedule(0)
    assert not FULL.schedule(1_000_001)


def test_what_is_wrong_is_found_before_a_model_is_known() -> None:
    FULL.check()
    with pytest.raises(ScheduleError):
        Request(path="", shown="", command=(), steps=0).check()
    with pytest.raises(PatternError):
        Request(path="", shown="", command=(), tensors=("re:[",)).check()
