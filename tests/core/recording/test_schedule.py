"""Which steps are recorded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.core.errors import ScheduleError
from retrograd.core.recording.schedule import as_schedule, every, log_schedule


@given(st.integers(1, 1000), st.integers(0, 10**6))
def test_every_nth(n: int, step: int) -> None:
    assert every(n)(step) == (step in range(0, 10**6 + 1, n))


def test_a_log_schedule_keeps_the_beginning_and_thins_out() -> None:
    taken = [step for step in range(10**4) if log_schedule(10)(step)]
    assert taken[:22] == [*range(11), *range(20, 101, 10), 200, 300]
    assert len(taken) == 10 + 9 * 3


@given(st.integers(1, 50), st.integers(0, 3))
def test_a_log_schedule_has_about_as_many_steps_in_each_decade(per_decade: int, decade: int) -> None:
    steps = range(10**decade, 10 ** (decade + 1))
    taken = [step for step in steps if log_schedule(per_decade)(step)]
    assert taken[0] == 10**decade
    assert min(len(steps), per_decade) * 0.9 <= len(taken) + 1 <= min(len(steps), 2 * per_decade) + 1


def test_what_a_user_writes() -> None:
    assert repr(as_schedule(None)) == "every step"
    assert [step for step in range(7) if as_schedule(3)(step)] == [0, 3, 6]
    assert as_schedule(lambda step: step == 4)(4)


@pytest.mark.parametrize("given", [0, -1, True, 1.5, "10", [1, 2], lambda: True, lambda step: None, lambda step: 1 / 0])
def test_a_schedule_that_is_none_is_refused(given: object) -> None:
    with pytest.raises(ScheduleError) as caught:
        as_schedule(given)  # type: ignore[arg-type]
    assert caught.value.repair


@pytest.mark.parametrize("make", [every, log_schedule])
@pytest.mark.parametrize("n", [0, -3, False, 2.0])
def test_a_schedule_of_no_steps_is_refused(make: object, n: object) -> None:
    with pytest.raises(ScheduleError, match="There is no schedule of"):
        make(n)  # type: ignore[operator]
