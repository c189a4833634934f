from __future__ import annotations

import pytest

from retrograd.core.errors import PatternError, ScheduleError
from retrograd.core.launch.requests import RunRequest

FULL = RunRequest(
    path="/runs/x",
    shown="x",
    command=("torchrun", "train.py"),
    sites=("a*", "!b"),
    schedule="log",
    tensors=("c",),
    histogram=False,
    resume=True,
)


@pytest.mark.parametrize("request_", [FULL, RunRequest(path="/x", shown="x", command=())])
def test_a_request_travels_through_the_environment(request_: RunRequest) -> None:
    assert RunRequest.read({RunRequest.variable: request_.write()}) == request_


def test_steps_are_a_schedule() -> None:
    third = RunRequest(every=3).make_schedule()
    assert [step for step in range(8) if third(step)] == [0, 3, 6]
    assert FULL.make_schedule()(0)
    assert not FULL.make_schedule()(1_000_001)
    every_step = [RunRequest(overhead="none"), RunRequest(every=1), RunRequest(watch=True)]
    assert {repr(each.make_schedule()) for each in every_step} == {"every step"}
    told = [
        repr(each.make_schedule()) for each in (RunRequest(), RunRequest(overhead="5%"), RunRequest(overhead="0.2"))
    ]
    assert told == [
        "every step for 60 s, then within a budget of 10 %",
        "within a budget of 5 %",
        "within a budget of 20 %",
    ]


@pytest.mark.parametrize("text", ["", "%", "much", "0%", "-5%", "500%", "nan", "inf"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="no share"):
        RunRequest(overhead=text).check()


def test_what_is_wrong_is_found_before_a_model_is_known() -> None:
    FULL.check()
    with pytest.raises(ScheduleError) as caught:
        RunRequest(every=0).check()
    assert caught.value.repair.endswith("--every 10.")
    with pytest.raises(PatternError):
        RunRequest(tensors=("re:[",)).check()
