"""Schedules: the optimizer steps that are recorded.

Loads without torch: the command line reads schedules too, and must answer within a moment.
"""

from __future__ import annotations

from collections.abc import Callable

from retrograd.core.errors import ScheduleError

Schedule = Callable[[int], bool]

_REPAIR = "give a number of steps, rg.every(n), rg.log_schedule(), or a function from step to bool."


class NamedSchedule:
    """A schedule that can say what it is."""

    def __init__(self, text: str, wants: Schedule) -> None:
        self._text = text
        self._wants = wants

    def __call__(self, step: int) -> bool:
        return self._wants(step)

    def __repr__(self) -> str:
        return self._text


def every(n: int) -> NamedSchedule:
    """Steps 0, n, 2n, …

    Raises:
        ScheduleError: unless n is a whole number above zero.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ScheduleError(
            f"A schedule of every {n!r} steps records nothing.",
            repair="give a whole number of at least 1, as in rg.every(10).",
        )
    return NamedSchedule("every step" if n == 1 else f"every {n} steps", lambda step: step % n == 0)


def log_schedule(per_decade: int = 10) -> NamedSchedule:
    """Every step at first, then ever fewer: about ``per_decade`` steps between 10ᵏ and 10ᵏ⁺¹.

    With 10 a decade: 0 … 10, 20, 30 … 100, 200, 300 … 1000 and so on, so that a long run keeps its beginning in
    full and its end in outline.

    Raises:
        ScheduleError: unless ``per_decade`` is a whole number above zero.
    """
    if isinstance(per_decade, bool) or not isinstance(per_decade, int) or per_decade < 1:
        raise ScheduleError(
            f"A schedule of {per_decade!r} steps a decade records nothing.",
            repair="give a whole number of at least 1, as in rg.log_schedule(10).",
        )

    def wants(step: int) -> bool:
        begin = 10 ** (len(str(step)) - 1)
        return step == 0 or (step - begin) % max(1, 10 * begin // per_decade) == 0

    return NamedSchedule(f"about {per_decade} steps a decade", wants)


def as_schedule(given: int | Schedule | None) -> Schedule:
    """A schedule from what a user wrote: None is every step, a number n is ``every(n)``.

    Raises:
        ScheduleError: for anything else that is not a function from a step's number to a bool; step 0 is tried.
    """
    if given is None:
        return every(1)
    if isinstance(given, int):
        return every(given)
    try:
        answer = given(0)
    except Exception as error:
        raise ScheduleError(f"{given!r} is not a schedule: {type(error).__name__}: {error}.", repair=_REPAIR) from error
    if answer is None:
        raise ScheduleError(f"{given!r} returns None, which records nothing.", repair=_REPAIR)
    return given
