"""Histograms of exponents over steps keep every element in sight."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from retrograd.core.views.report.blocks import (
    LEVELS_PER_OCTAVE,
    SMALLEST_SHARE,
    encode_shares,
    make_exponent_block,
)
from retrograd.core.views.report.scope import choose_scope
from tests.core.views.invented import Numbers, make_history


@given(st.data(), st.integers(1, 6), st.integers(1, 12))
def test_a_code_is_the_logarithm_of_the_share(data: st.DataObject, columns: int, n: int) -> None:
    place = sorted(data.draw(st.lists(st.integers(0, columns - 1), min_size=n, max_size=n)))
    counts = data.draw(st.lists(st.lists(st.integers(0, 10**6), min_size=3, max_size=3), min_size=n, max_size=n))
    added = [
        [sum(line[row] for line, at in zip(counts, place, strict=True) if at == column) for row in range(3)]
        for column in range(columns)
    ]
    codes = encode_shares(np.array(added))
    for column, total in enumerate(added):
        for row, count in enumerate(total):
            code = int(codes[row, column])
            assert (code == 0) == (count == 0)
            if count:
                octaves = max(math.log2(count / sum(total)), SMALLEST_SHARE)
                assert abs((code - 1) / LEVELS_PER_OCTAVE + SMALLEST_SHARE - octaves) <= 0.5 / LEVELS_PER_OCTAVE + 1e-9


def test_a_stretch_begins_at_the_exponent_of_its_first_bin() -> None:
    rms = np.full((2, 4), 0.25)
    history = make_history(Numbers(["a:output", "b:output"], rms, bins=5))
    block = make_exponent_block(choose_scope(history, None, 1000, 8.0))
    assert block is not None
    top = -2 + 2  # the bell reaches two octaves above rms
    assert block.facts["stretches"] == {0: [0, top - 5, 5], 1: [20, top - 5, 5]}
    assert block.facts["merged"] == 1


def test_without_histograms_there_is_no_block() -> None:
    history = make_history(Numbers(["a:output"], np.ones((1, 4)), bins=0))
    assert make_exponent_block(choose_scope(history, None, 1000, 8.0)) is None
