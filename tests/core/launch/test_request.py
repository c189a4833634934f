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


def test_what_is_wrong_is_found_before_a_model_is_known() -> None:
    FULL.check()
    with pytest.raises(ScheduleError) as caught:
        RunRequest(every=0).check()
    assert caught.value.repair.endswith("--every 10.")
    with pytest.raises(PatternError):
        RunRequest(tensors=("re:[",)).check()
