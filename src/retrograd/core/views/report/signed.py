"""Histograms around zero of a page, by series: a few steps of each, and the bounds of each."""

from __future__ import annotations

import math

import numpy as np

from retrograd.core.views.page.frame import pack_json
from retrograd.core.views.report.scope import Scope

_MOST_STEPS, _MOST_NUMBERS = 12, 1_500_000
"""Steps of a site that are drawn; counts in a page, beyond which later sites have none."""


def pack_signed(scope: Scope) -> str | None:
    """Rows of step, bound, elements and counts for each series that has any; None where there is none."""
    found = scope.history.signed_histograms()
    series: dict[int, list[tuple[int, float, int, tuple[int, ...]]]] = {}
    room = _MOST_NUMBERS
    for number, site in enumerate(scope.sites):
        ranked = sorted(found.get(site, []), key=lambda fact: -fact.rank)
        of_step = {fact.step: fact for fact in ranked if math.isfinite(fact.value)}
        steps = sorted(of_step)
        places = np.linspace(0, len(steps) - 1, min(len(steps), _MOST_STEPS)).round().astype(int)
        chosen = [steps[place] for place in places]
        facts = [of_step[step] for step in chosen]
        room -= sum(len(fact.counts) for fact in facts)
        if facts and room >= 0:
            series[number] = [(fact.step, fact.value, fact.elements, fact.counts) for fact in facts]
    return pack_json(series) if series else None
