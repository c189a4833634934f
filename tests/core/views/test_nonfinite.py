"""The first site that went wrong is named, in the order in which a step runs."""

from __future__ import annotations

import numpy as np
import pytest

from retrograd.core.views.report.findings import find_first_nonfinite
from retrograd.core.views.report.scope import choose_scope
from retrograd.core.views.shown import group_places
from tests.core.views.invented import Numbers, make_history

SITES = ["a:output", "a:output.grad", "a:weight.grad", "a:weight.update", "b:output", "b:output.grad"]


@pytest.mark.parametrize(
    ("bad", "first"),
    [
        ({"a:output.grad", "b:output"}, "b:output"),  # forward comes before backward
        ({"a:output.grad", "b:output.grad"}, "b:output.grad"),  # backward runs from the last call to the first
        ({"a:output", "b:output"}, "a:output"),
        ({"a:weight.grad", "a:output.grad"}, "a:output.grad"),
        ({"a:weight.update", "a:weight.grad"}, "a:weight.grad"),
    ],
)
def test_first_site_of_the_first_bad_step(bad: set[str], first: str) -> None:
    nan = np.zeros((len(SITES), 8), dtype=np.int64)
    for site in bad:
        nan[SITES.index(site), 5:] = 3
    nan[:, 7] = 9
    history = make_history(Numbers(SITES, np.ones(nan.shape), nan=nan, every=10))
    found = find_first_nonfinite(choose_scope(history, None, 1000, 8.0), group_places(SITES))
    assert found == {"step": 50, "site": first, "text": "3 NaN of 4,096 elements"}


def test_nothing_to_name() -> None:
    history = make_history(Numbers(SITES, np.ones((len(SITES), 3))))
    assert find_first_nonfinite(choose_scope(history, None, 1000, 8.0), group_places(SITES)) is None
