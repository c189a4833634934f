"""Arrow arrays made from buffers, against those that pyarrow itself makes; and that none of it loads pandas."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from retrograd.core.history.arrays import read_numbers, to_coded_texts, to_numbers, to_texts
from retrograd.core.history.sink import Event, Moment
from retrograd.core.history.table import EVENT_SCHEMA, build_event_table
from tests import warm

NUMBERS = {
    "whole": np.arange(5),
    "every second": np.arange(10, dtype=np.float32)[::2],
    "one for all": np.broadcast_to(np.array(3, np.int16), 4),
    "none": np.empty(0, np.float64),
    "not finite": np.array([np.nan, np.inf, -0.0]),
    "small": np.array([1, 255], np.uint8),
    "truth": np.array([True, False, True] * 3),
    "stretch of truth": np.array([True, False, True] * 3)[1:],
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("kind", [None, pa.int64(), pa.float64()])
def test_numbers_are_those_of_pyarrow(name: str, kind: pa.DataType | None) -> None:
    values = NUMBERS[name]
    try:
        expected = pa.array(values) if kind is None else pa.array(values).cast(kind)
    except pa.ArrowInvalid:
        with pytest.raises(pa.ArrowInvalid):
            to_numbers(values, kind)
        return
    found = to_numbers(values, kind)
    found.validate(full=True)
    assert found.type == expected.type
    np.testing.assert_array_equal(found.to_numpy(zero_copy_only=False), expected.to_numpy(zero_copy_only=False))


def test_a_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises(pa.ArrowInvalid):
        to_numbers(np.array([1 << 40]), pa.int32())


TEXTS = (["", "a", "ä🙂", "a", "x" * 1000], [], [""], ["a\0b", "\n"])


@pytest.mark.parametrize("texts", TEXTS)
def test_texts_are_those_of_pyarrow(texts: list[str]) -> None:
    plain, coded = to_texts(texts), to_coded_texts(texts)
    plain.validate(full=True)
    coded.validate(full=True)
    assert plain.equals(pa.array(texts, pa.string()))
    assert coded.type == EVENT_SCHEMA.field("name").type
    assert coded.cast(pa.string()).equals(pa.array(texts, pa.string()))


def test_what_is_no_unicode_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        to_texts(["\ud800"])


def test_a_missing_number_is_nan() -> None:
    column = pa.chunked_array([pa.array([1.0, None]), pa.array([2.0])])
    np.testing.assert_array_equal(read_numbers(column), [1.0, np.nan, 2.0])


def test_events_are_those_of_pyarrow() -> None:
    events = [
        Event(Moment(step, step % 2, -1, "eval" if step else "train"), "loss", "ä" * step, step, "text", 1e9 + step)
        for step in range(3)
    ]
    lines = [
        {"step": each.moment.step, "micro": each.moment.micro, "backward": each.moment.backward}
        | {"phase": each.moment.phase, "kind": each.kind, "name": each.name}
        | {"value": float(each.value), "text": each.text, "time": each.time}
        for each in events
    ]
    plain = pa.schema([(field.name, getattr(field.type, "value_type", field.type)) for field in EVENT_SCHEMA])
    found = build_event_table(events)
    assert found.schema.equals(EVENT_SCHEMA)
    assert found.cast(plain).equals(pa.Table.from_pylist(lines, plain))


SCRIPT = """
import sys, torch
import retrograd as rg
from retrograd.core.runs.writer import RunWriter

model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with rg.record(model, sys.argv[1], tensors="0:output") as recording:
    for step in range(40):  # so many that parts are merged
        model(torch.full((4, 2), step + 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        recording.flush()
RunWriter(sys.argv[1], resume=True, step=2).close()
run = rg.open_run(sys.argv[1])
assert run.history["0:output"].rms.shape == run.history.loss.values.shape == (2,)
rg.compact(run)
assert "pandas" not in sys.modules
"""


def test_neither_recording_nor_reading_loads_pandas(tmp_path: Path) -> None:
    program = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    warm.run(program, check=True, timeout=100, stage="torch")  # all of ours would load what it can use
