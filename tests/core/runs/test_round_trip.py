import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from retrograd.core.history.history import History
from retrograd.core.history.sink import Event, Moment, RowBatch
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.writer import RunWriter
from tests.core.history.made import SITES
from tests.core.history.strategies import many_batches, moments
from tests.core.runs.written import NEVER, sort_rows

events = st.builds(
    Event,
    moments,
    st.sampled_from(["loss", "fault", "note"]),
    st.sampled_from(["", "a:output", "AdamW"]),
    st.floats(),
    st.text(st.characters(codec="utf-8")),
    st.floats(0, 1e9),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(many_batches, max_size=4), st.lists(events, max_size=5))
def test_what_is_written_is_what_memory_holds(flushes: list[list[RowBatch]], told: list[Event]) -> None:
    memory = History()
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter(folder, flush_seconds=NEVER)
        for sink in (memory, writer):
            sink.add_sites(SITES)
            for batches in flushes:
                for batch in batches:
                    sink.add_rows(batch)
                sink.flush()
            for event in told:
                sink.add_event(event)
            sink.close()
        stored = open_run(Path(folder)).history
        assert stored.sites == memory.sites
        assert repr(stored.events) == repr(memory.events)
        expected, found = sort_rows(memory), sort_rows(stored)
        assert expected.column_names == found.column_names
        for name in expected.column_names:
            assert repr(expected[name].to_pylist()) == repr(found[name].to_pylist()), name
        for site in SITES:
            for phase in ("train", None):
                series, twin = memory[site].select(phase=phase), stored[site].select(phase=phase)
                np.testing.assert_array_equal(series.steps, twin.steps)
                np.testing.assert_array_equal(series.exponents[1], twin.exponents[1])
                np.testing.assert_allclose(series.rms, twin.rms, rtol=1e-12)


def test_the_loss_comes_back(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    for step in range(5):
        writer.add_event(Event(Moment(step, 0, 0), "loss", value=step / 2))
    writer.close()
    steps, values = open_run(tmp_path).history.loss
    np.testing.assert_array_equal(steps, range(5))
    np.testing.assert_array_equal(values, np.arange(5) / 2)
