"""Plans that make again whatever can be made again, however much time that takes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from retrograd.budget import planned
from retrograd.budget.plan import Plan
from retrograd.budget.planned import Planned
from retrograd.budget.planner import Solution
from retrograd.budget.simulation import Choice, Decisions, Link, MeasuredPass


def rerun_everything(recording: MeasuredPass, link: Link, budget: int, destination: str) -> Plan:
    """Stands in for ``make_plan``."""
    choices: list[Choice] = ["rerun" if saved_range.rerun else "keep" for saved_range in recording.ranges]
    return Plan(budget, recording, link, Solution(Decisions(choices, 0), 0, 0.0), destination, 0)


def mix_choices(dice: random.Random) -> Callable[[MeasuredPass, Link, int, str], Plan]:
    """Stands in for ``make_plan``: plans that nobody would make, with any choice that is possible for each range."""

    def mix(recording: MeasuredPass, link: Link, budget: int, destination: str) -> Plan:
        choices: list[Choice] = []
        for saved_range in recording.ranges:
            possible: list[Choice] = ["keep", "offload"]
            possible += ["rerun", "rerun"] if saved_range.rerun else []
            choices.append(dice.choice(possible))
        return Plan(budget, recording, link, Solution(Decisions(choices, 0), 0, 0.0), destination, 0)

    return mix


def force_reruns(patch: pytest.MonkeyPatch) -> Planned:
    """A policy under which everything is made again that can be."""
    patch.setattr(planned, "make_plan", rerun_everything)
    return Planned(2**40, min_bytes=0)


def made_again(policy: Planned) -> set[str]:
    """The operations that its plans run again, in words."""
    return {
        word
        for plan in policy.plans
        for saved_range, choice in zip(plan.recording.ranges, plan.choices, strict=True)
        if choice == "rerun"
        for word in saved_range.rerun.split(", ")
    }
