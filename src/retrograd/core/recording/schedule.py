"""Schedules: the optimizer steps that are recorded.

Loads without torch: the command line reads schedules too, and must answer within a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from retrograd.core.amounts import count_of
from retrograd.core.errors import ScheduleError

Schedule = Callable[[int], bool]

_REPAIR = "give a number of steps, rg.every(n), rg.overhead(0.05), rg.log_schedule(), or a function from step to bool."

FULL_STEPS = 100
"""Steps that a budget for overhead records in full at first."""


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
            f"There is no schedule of every {n!r} steps.",
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
            f"There is no schedule of {per_decade!r} steps a decade.",
            repair="give a whole number of at least 1, as in rg.log_schedule(10).",
        )

    def wants(step: int) -> bool:
        begin = 10 ** (len(str(step)) - 1)
        return step == 0 or (step - begin) % max(1, 10 * begin // per_decade) == 0

    return NamedSchedule(f"about {per_decade} steps a decade", wants)


class Overhead(NamedSchedule):
    """A schedule that keeps what recording costs within a share of the bare step: see :mod:`budget`.

    Called, it says only which steps are certain to be recorded: the others are chosen by what steps cost.

    Attributes:
        share: the share.
        full_seconds: for how long every step is recorded, however much that costs.
    """

    def __init__(self, share: float, full_seconds: float) -> None:
        begin = f"every step for {full_seconds:g} s, then " if full_seconds else ""
        super().__init__(f"{begin}within a budget of {100 * share:g} %", lambda step: step < FULL_STEPS)
        self.share, self.full_seconds = share, full_seconds


def overhead(share: float = 0.05, *, full_seconds: float = 0.0) -> Overhead:
    """As many steps as can be recorded for this share of the time that a step takes by itself.

    The first 100 steps are recorded in full. Then the time of recorded and of unrecorded steps is measured (CPU time
    of the training thread; where torch has begun to use CUDA, time on the device), and one of each 2, 4, 8 … steps is
    recorded, not always the first, but the same in two runs; updates of weights at fewer of them. Sixteen steps are
    recorded in full after a loss that jumps or is not finite, a norm of the gradient beyond its range, and where a new
    phase of training begins. Losses, learning rates, calls and what you log are recorded at every step.

    What that takes at unrecorded steps is a part of the share, where it can be measured: not on a device. Of small nets
    it may be more than all of it; a quarter of the share goes to recorded steps nevertheless.

    Args:
        share: of the time of a step that nothing is attached to: 0.05 is 5 %.
        full_seconds: for how long every step is recorded at first, besides.

    Raises:
        ScheduleError: unless the share is a number between 0 and 1, and the time is not negative.
    """
    times = f", full_seconds={full_seconds!r}" if full_seconds != 0 else ""
    is_share = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
    if not is_share or not full_seconds >= 0:
        raise ScheduleError(
            f"There is no schedule of overhead({share!r}{times}).",
            repair="give a share above 0 and up to 1, as in rg.overhead(0.05), and seconds of at least 0.",
        )
    return Overhead(float(share), float(full_seconds))


def read_overhead(text: str) -> NamedSchedule:
    """The schedule that an option says: ``5%``, ``0.05``, or ``none`` for every step.

    Raises:
        ScheduleError: for any other text.
    """
    if text == "none":
        return every(1)
    try:
        return overhead(float(text.removesuffix("%")) / (100 if text.endswith("%") else 1))
    except (ValueError, ScheduleError):
        raise ScheduleError(
            f"{text!r} is no share of a step's time.",
            repair="give one above 0 and up to 100 %, as in --overhead 5%, or --overhead none.",
        ) from None


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


def describe_schedule(manifest: Mapping[str, Any]) -> str:
    """The schedule of a run, and under a budget for overhead what has come of it, from its manifest alone."""
    told, text = manifest.get("overhead"), manifest.get("schedule")
    schedule = ", ".join(map(str, text)) if isinstance(text, list) else str(text or "")
    if not isinstance(told, Mapping):
        return schedule
    steps, recorded, updates, measured = (told.get(name) for name in ("steps", "recorded", "updates", "measured"))
    if not all(isinstance(each, int) for each in (steps, recorded, updates)):
        return schedule
    if steps == recorded and updates in (0, steps):
        return "every step"
    counts = f"{recorded:,} of {steps:,} steps" + (f", {updates:,} with updates" if updates else "")
    spent, between = "", told.get("between")
    if isinstance(measured, float):
        where = f", {100 * between:.2g} points of it between " if isinstance(between, float) else " beyond un"
        spent = f"; {100 * measured:.2g} % measured{where}recorded steps"
    return f"{schedule} ({counts}{spent})"


def count_recorded(overhead: Mapping[str, Any] | None, steps: int) -> str:
    """How many steps were recorded, in words, and what that took where it was more than was wanted.

    Args:
        overhead: what the manifest says of a budget; None without one.
        steps: how many there were in all.
    """
    if overhead is None or overhead["recorded"] == overhead["steps"]:
        return count_of(steps, "step")
    share, measured = overhead["share"], overhead["measured"]
    counts = f"{overhead['recorded']:,} of {count_of(overhead['steps'], 'step')}"
    if measured is None or measured < 1.5 * share:
        return counts
    return f"{counts} (measured: {100 * measured:.2g} % of a step's own time, where {100 * share:g} % were wanted)"
