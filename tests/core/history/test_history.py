import threading

import numpy as np
import pytest

from retrograd.core.errors import NoSuchSiteError
from retrograd.core.history.history import History
from retrograd.core.history.rows import join_neighbours
from retrograd.core.history.sink import Event, Moment
from retrograd.core.history.table import STATISTICS_COLUMNS, build_event_table, read_events
from tests.core.history.made import SITES, make_batch, make_steps
from tests.core.history.test_series import make_history


def test_sites_are_in_the_order_first_named() -> None:
    history = make_history([])
    history.add_sites(["c:output", "a:output"])  # a row of its own for a site that has one
    assert history.sites == [*SITES, "c:output"]
    history.add_rows(make_batch(Moment(0), {6: np.full(2, 9.0)}))
    assert history["a:output"].mean.tolist() == [9.0]
    assert "c:output" in history
    assert "d:output" not in history
    assert len(history) == len(list(history)) == 1


@pytest.mark.parametrize(("wrong", "near"), [("a:ouput", "a:output"), ("b:weight.updates", "b:weight.update")])
def test_a_wrong_name_is_told_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(NoSuchSiteError, match=f"'{wrong}'(.|\n)*'{near}'"):
        make_history([])[wrong]


def test_a_name_when_nothing_is_recorded() -> None:
    with pytest.raises(NoSuchSiteError, match="nothing is recorded yet"):
        History()["a:output"]


def test_selecting_by_pattern() -> None:
    history = make_history([])
    assert history.select("*:output.grad") == ["a:output.grad", "b:output.grad"]
    assert history.select("re:^b.*(grad|update)$") == ["b:output.grad", "b:weight.update"]
    with pytest.raises(NoSuchSiteError, match="matches no recorded site"):
        history.select("c.*")


def test_events_come_back_as_they_were() -> None:
    events = [
        Event(Moment(3, 1, 0), "loss", value=0.5, time=12.5),
        Event(Moment(3), "fault", "a:output", text="what\nwent wrong"),
        Event(Moment(4, 0, -1, "eval"), "note", text="ünïcode"),
    ]
    history = History()
    for event in events[:2]:
        history.add_event(event)
    assert repr(history.events) == repr(events[:2])
    history.add_event(events[2])
    assert repr(history.events) == repr(events)
    assert read_events(build_event_table([])) == []


def test_the_loss_is_the_mean_over_a_step() -> None:
    history = History()
    for step, micro, value in [(0, 0, 1.0), (0, 1, 3.0), (2, 0, float("nan")), (1, 0, 4.0)]:
        history.add_event(Event(Moment(step, micro, 0), "loss", value=value))
    history.add_event(Event(Moment(7), "update", "AdamW", 7.0))
    steps, values = history.loss
    np.testing.assert_array_equal(steps, [0, 1, 2])
    np.testing.assert_array_equal(values, [2.0, 4.0, np.nan])
    assert len(History().loss.steps) == 0


def test_the_table_has_the_columns_of_the_run_folder() -> None:
    history = make_history(make_steps(range(2)), rank=3)
    table = history.table()
    assert table.column_names == [column.name for column in STATISTICS_COLUMNS] + ["rank"]
    assert table["site"].to_pylist() == SITES * 2
    assert set(table["rank"].to_pylist()) == {3}
    assert table["rms"].to_pylist()[0] == pytest.approx(history["a:output"].rms[0])
    assert History().table().num_rows == 0


def test_the_end_is_noted() -> None:
    history = History()
    history.describe(model={"layers": 2})
    history.flush()
    history.close("failed")
    history.close()
    assert history.manifest == {"model": {"layers": 2}, "status": "failed"}


def test_rows_may_be_read_while_they_are_added() -> None:
    history = make_history([])
    batches = make_steps(range(300), n_sites=3)

    def add() -> None:
        for batch in batches:
            history.add_rows(batch)

    adding = threading.Thread(target=add)
    adding.start()
    seen = [0]
    while adding.is_alive():
        seen.append(len(history["a:output"].rms))
    adding.join()
    assert seen == sorted(seen)
    np.testing.assert_array_equal(
        history.matrix("mean", SITES[:3]).values, make_history(batches).matrix("mean").values[:3]
    )


def test_parts_are_joined_by_size() -> None:
    parts: list = []
    for size in [1] * 1000:
        parts = join_neighbours([*parts, {"step": np.arange(size), "x": np.ones(size)}])
        assert len(parts) <= 10
    assert sum(len(part["step"]) for part in parts) == 1000
