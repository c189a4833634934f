"""Hypothesis strategies: batches of rows as a recorder might give them."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np

from retrograd.core.history.sink import PHASES, Moment, RowBatch
from tests.core.history.made import SITES, make_batch

any_float = st.floats(width=32) | st.sampled_from([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3e38])
elements = st.lists(any_float, max_size=6).map(lambda values: np.array(values, np.float64))
moments = st.builds(
    Moment,
    step=st.integers(0, 5),
    micro=st.integers(0, 2),
    backward=st.integers(0, 1),
    phase=st.sampled_from(PHASES),
)


@st.composite
def batches(draw: st.DrawFn) -> RowBatch:
    rows = draw(st.dictionaries(st.integers(0, len(SITES) - 1), elements, max_size=len(SITES)))
    custom = {}
    if rows and draw(st.booleans()):  # a recorder names a statistic only with values
        values = {number: draw(st.floats(allow_nan=False)) for number in rows}
        custom = {"entropy": (list(values), list(values.values()))}
    return make_batch(draw(moments), rows, scale=draw(st.sampled_from([1.0, 2.0**16, 0.5, 3.0])), custom=custom)


many_batches = st.lists(batches(), max_size=8)
