"""Plans that recompute whatever can be recomputed, however much time that takes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from retrograd.memory.budget import planned
from retrograd.memory.budget.plan import Plan
from retrograd.memory.budget.planned import Planned
from retrograd.memory.budget.planner import Solution
from retrograd.memory.budget.simulation import Choice, Decisions, Link, MeasuredPass


def recompute_everything(recording: MeasuredPass, link: Link, budget: int, destination: str) -> Plan:
    """Stands in for ``make_plan``."""
    choices: list[Choice] = ["recompute" if saved_range.recompute else "keep" for saved_range in recording.ranges]
    return Plan(budget, recording, link, Solution(Decisions(choices, 0), 0, 0.0), destination, 0)


def mix_choices(dice: random.Random) -> Callable[[MeasuredPass, Link, int, str], Plan]:
    """Stands in for ``make_plan``: plans that nobody would make, with any choice that is possible for each range."""

    def mix(recording: MeasuredPass, link: Link, budget: int, destination: str) -> Plan:
        choices: list[Choice] = []
        for saved_range in recording.ranges:
            possible: list[Choice] = ["keep", "offload"]
            possible += ["recompute", "recompute"] if saved_range.recompute else []
            choices.append(dice.choice(possible))
        return Plan(budget, recording, link, Solution(Decisions(choices, 0), 0, 0.0), destination, 0)

    return mix


def force_recomputing(patch: pytest.MonkeyPatch) -> Planned:
    """A policy under which everything is recomputed that can be."""
    patch.setattr(planned, "make_plan", recompute_everything)
    return Planned(2**40, min_bytes=0)


def recomputed(policy: Planned) -> set[str]:
    """The operations with which its plans recompute, in words."""
    return {
        word
        for plan in policy.plans
        for saved_range, choice in zip(plan.recording.ranges, plan.choices, strict=True)
        if choice == "recompute"
        for word in saved_range.recompute.split(", ")
    }
