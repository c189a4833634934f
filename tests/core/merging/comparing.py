"""Compares a run whose ranks were merged while they trained with one that is merged by its reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from retrograd.core.runs.layout import list_rank_folders
from retrograd.core.runs.reader import Run, open_run

EXACT = ("count", "nan", "pos_inf", "neg_inf", "zeros", "min", "max")
ROUNDED = ("mean", "std", "rms", "l1", "l2", "update_ratio")


def assert_alike(merged: Path, apart: Path) -> tuple[Run, Run]:
    """Each series of one is that of the other: counts, extremes and histograms to the bit, the rest to rounding."""
    one, many = open_run(merged), open_run(apart)
    assert sorted(one.history.sites) == sorted(many.history.sites)
    for site in many.history.sites:
        ours, theirs = one.history[site], many.history[site]
        assert ours.steps.tolist() == theirs.steps.tolist(), site
        for name in EXACT:
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=f"{site} {name}")
        for name in ROUNDED:
            left, right = getattr(ours, name), getattr(theirs, name)
            np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-12, err_msg=f"{site} {name}")
        np.testing.assert_array_equal(ours.exponents[1], theirs.exponents[1], err_msg=site)
    np.testing.assert_allclose(one.history.loss.values, many.history.loss.values, rtol=1e-12)
    assert one.history.loss.steps.tolist() == many.history.loss.steps.tolist()
    return one, many


def list_names(run: Path) -> list[str]:
    """The folders of ranks that are there."""
    return [path.name for path in list_rank_folders(run)]
