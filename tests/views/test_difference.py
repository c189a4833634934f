"""Two runs on the same axes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from retrograd.history.history import History
from retrograd.views.report import write_report
from retrograd.views.report.blocks import compare_rms, tell_first_difference
from tests.views.invented import Numbers, make_history
from tests.views.unpacking import Page

SITES = ["a:output", "b:output"]


def history(rms: list[list[float]], sites: list[str] = SITES, every: int = 1) -> History:
    return make_history(Numbers(sites, np.array(rms), every=every, bins=0))


def test_the_difference_is_the_logarithm_of_the_ratio_where_both_have_something() -> None:
    ours = history([[1.0, 8.0, 1.0], [3.0, 0.0, 5.0]])
    theirs = history([[0.0, 2.0], [1.0, 4.0]], ["b:output", "a:output"])
    ratios = compare_rms(ours, theirs, SITES, "train")
    np.testing.assert_array_equal(ratios, [[0.0, 1.0, np.nan], [np.inf, -np.inf, np.nan]])


def test_steps_are_matched_by_number() -> None:
    ratios = compare_rms(history([[1.0] * 5] * 2), history([[2.0] * 3] * 2, every=2), SITES, "train")
    np.testing.assert_array_equal(ratios[0], [-1.0, np.nan, -1.0, np.nan, -1.0])


def test_the_first_difference_is_named() -> None:
    steps = np.array([0, 10, 20])
    assert tell_first_difference(np.array([[0.0, 0.0, 1.0], [0.0, 1e-15, 0.0]]), SITES, steps) == "step 10, b:output"
    assert tell_first_difference(np.zeros((2, 3)), SITES, steps) == "none"
    assert tell_first_difference(np.full((2, 3), np.nan), SITES, steps) == "nothing in common"


def test_the_page_opens_with_the_difference(tmp_path: Path) -> None:
    path = write_report(history([[1.0, 4.0]] * 2), tmp_path / "page.html", against=history([[1.0, 1.0]] * 2))
    page = Page(path)
    assert page.facts["measures"][0]["label"] == "rms ratio to history in memory"
    assert page.line("against", "low", "b:output").tolist() == [0.0, 2.0]
    assert ["first difference", "step 1, a:output"] in page.facts["header"]
