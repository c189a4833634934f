"""Plans that nobody would make."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from retrograd.memory.budget import planned
from retrograd.memory.budget.plan import Plan
from retrograd.memory.budget.planned import Planned
from retrograd.memory.budget.planner import Solution
from retrograd.memory.budget.simulation import Choice, Decisions, Link, MeasuredPass


def mix_choices(dice: random.Random) -> Callable[[MeasuredPass, Link, int, str], Plan]:
    """Stands in for ``make_plan``: any choice for each range."""

    def mix(recording: MeasuredPass, link: Link, budget: int, destination: str) -> Plan:
        options: list[Choice] = ["keep", "offload"]
        choices = [dice.choice(options) for _ in recording.ranges]
        return Plan(budget, recording, link, Solution(Decisions(choices, 0), 0, 0.0), destination, 0)

    return mix


def force_offloading(patch: pytest.MonkeyPatch) -> Planned:
    """A policy that takes every other range or so elsewhere, though there is room for all."""
    patch.setattr(planned, "make_plan", mix_choices(random.Random(0)))
    return Planned(2**40, min_bytes=0)
