"""The parts that a report is made of, each by itself."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from retrograd.core.history.history import History
from retrograd.core.history.sink import Event, EventKind, Moment
from retrograd.core.runs.reader import Rank
from retrograd.core.views.downsample import reduce_columns, share_columns
from retrograd.core.views.page.frame import pack_floats, round_mantissa, significant_digits
from retrograd.core.views.report.blocks import LEVELS_PER_OCTAVE, SMALLEST_SHARE, encode_shares, make_exponent_block
from retrograd.core.views.report.facts import (
    MOST_LINES,
    describe_recorded,
    list_modules,
    list_troubles,
    make_header,
    print_command,
)
from retrograd.core.views.report.findings import find_first_nonfinite
from retrograd.core.views.report.scope import FEWEST_COLUMNS, MANTISSAS, choose_detail, choose_scope
from retrograd.core.views.shown import group_places
from retrograd.core.views.terminal import BLOCKS, draw_sparkline
from tests.core.views.invented import Numbers, make_history
from tests.core.views.unpacking import unpack_floats

# ---- detail: digits go before columns, and both only when they must ----


@given(st.integers(0, 5000), st.integers(0, 10**6), st.integers(FEWEST_COLUMNS, 4000), st.floats(1e5, 1e8))
def test_never_more_columns_than_asked_and_columns_go_last(sites: int, steps: int, most: int, room: float) -> None:
    columns, bits = choose_detail(sites, steps, most, room)
    assert 1 <= columns <= max(min(most, steps), FEWEST_COLUMNS)
    if bits > MANTISSAS[-1]:
        assert columns == max(min(most, steps), 1)


@given(st.integers(1, 2000), st.integers(1, 10**5), st.floats(1e5, 1e7))
def test_more_room_never_means_less_detail(sites: int, steps: int, room: float) -> None:
    small, large = choose_detail(sites, steps, 1000, room), choose_detail(sites, steps, 1000, 2 * room)
    assert large[0] >= small[0]
    assert large[1] >= small[1]


def test_a_demo_is_written_in_full() -> None:
    assert choose_detail(200, 460, 1000, 7e6) == (460, MANTISSAS[0])


# ---- columns keep the extremes of their steps ----


numbers = st.floats(-1e6, 1e6) | st.just(math.nan)
tables = st.tuples(st.integers(1, 4), st.integers(1, 60)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=numbers)
)


@given(tables, st.integers(1, 20))
def test_each_column_has_the_extremes_and_the_mean_of_its_own_values(values: np.ndarray, width: int) -> None:
    bands = reduce_columns(values, width)
    for row, line in enumerate(values):
        pieces = [line[start : start + width] for start in range(0, len(line), width)]
        assert bands.low.shape[1] == len(pieces)
        for column, piece in enumerate(pieces):
            known = [value for value in piece if not math.isnan(value)]
            cell = bands.low[row, column], bands.mean[row, column], bands.high[row, column]
            if not known:
                assert all(math.isnan(number) for number in cell)
                continue
            assert cell[0] == min(known)
            assert cell[1] == pytest.approx(math.fsum(known) / len(known), rel=1e-9, abs=1e-6)
            assert cell[2] == max(known)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=200, unique=True).map(sorted), st.integers(1, 50))
def test_columns_share_all_steps_in_order_and_stay_few(steps: list[int], most: int) -> None:
    columns = share_columns(np.array(steps), most)
    assert len(columns) <= most
    assert columns.first[0] == steps[0]
    assert columns.last[-1] == steps[-1]
    groups = [steps[i : i + columns.width] for i in range(0, len(steps), columns.width)]
    assert [group[0] for group in groups] == columns.first.tolist()
    assert [group[-1] for group in groups] == columns.last.tolist()
    assert [number for number, group in enumerate(groups) for _ in group] == columns.place(np.array(steps)).tolist()


def test_infinite_numbers_stay_extremes() -> None:
    bands = reduce_columns(np.array([[1.0, np.inf, -np.inf, 2.0]]), 2)
    assert bands.high.tolist() == [[np.inf, 2.0]]
    assert bands.low.tolist() == [[1.0, -np.inf]]


def test_as_few_steps_as_columns_are_left_as_they_are() -> None:
    values = np.array([[3.0, np.nan, 1.0]])
    bands = reduce_columns(values, share_columns(np.arange(3), 1000).width)
    assert bands.low is bands.mean is bands.high is values


# ---- histograms of exponents over steps keep every element in sight ----


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


# ---- the first site that went wrong is named, in the order in which a step runs ----


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


# ---- what is packed comes back, as exactly as promised ----


singles = arrays(np.float32, array_shapes(max_dims=3, max_side=6), elements=st.floats(width=32))


@given(singles)
def test_single_precision_survives_bit_for_bit(values: np.ndarray) -> None:
    np.testing.assert_array_equal(unpack_floats(pack_floats(values)), values.ravel())


@given(arrays(np.float32, 8, elements=st.floats(width=32, allow_subnormal=False)), st.integers(7, 22))
def test_rounding_keeps_the_promised_digits_and_what_is_not_finite(values: np.ndarray, bits: int) -> None:
    rounded = round_mantissa(values, bits)
    finite = np.isfinite(values) & (np.abs(values) < 1e38)  # the very largest may round to infinity
    error = np.abs(rounded[finite].astype(np.float64) - values[finite])
    assert np.all(error <= np.abs(values[finite].astype(np.float64)) * 2.0 ** -(bits + 1))
    np.testing.assert_array_equal(rounded[~np.isfinite(values)], values[~np.isfinite(values)])
    assert 10.0 ** -significant_digits(bits) >= 2.0 ** -(bits + 1)


def test_numbers_beyond_single_precision_become_infinite_or_zero() -> None:
    assert unpack_floats(pack_floats(np.array([1e300, -1e300, 1e-300]))).tolist() == [np.inf, -np.inf, 0.0]


def test_equal_numbers_give_equal_text() -> None:
    assert pack_floats(np.arange(5.0)) == pack_floats(np.arange(5.0))


# ---- sites of one thing are one place ----


def test_places_come_in_the_order_of_their_first_site() -> None:
    places = group_places(["a:weight.grad", "b:output", "a:weight.update", "b:output.grad", "a:weight"])
    assert [place.name for place in places] == ["a:weight", "b:output"]
    assert places[0].sites == {"grad": "a:weight.grad", "update": "a:weight.update", "value": "a:weight"}


def test_inputs_outputs_and_watched_tensors_are_activations() -> None:
    sites = ["a:input.x.grad", "a:output.logits", "watch/z.grad", "a:bias.grad"]
    assert [place.kind for place in group_places(sites)] == ["activation"] * 3 + ["parameter"]


def test_a_name_that_is_no_site_is_a_place_by_itself() -> None:
    (place,) = group_places(["not a site at all"])
    assert (place.name, place.path) == ("not a site at all", "not a site at all")


# ---- a curve in one line of text ----


def test_heights_follow_the_numbers() -> None:
    assert draw_sparkline(np.arange(8.0), 8, logarithmic=False) == BLOCKS
    assert draw_sparkline(10.0 ** np.arange(8), 8) == BLOCKS


def test_a_spike_among_many_steps_is_seen() -> None:
    values = np.ones(10_000)
    values[5_432] = 1000.0
    drawn = draw_sparkline(values, 20)
    assert drawn.count("█") == 1
    assert drawn.index("█") == 5_432 * 20 // 10_000


def test_what_is_missing_is_a_gap() -> None:
    assert draw_sparkline(np.array([1.0, np.nan, 2.0]), 8) == "▁ █"


@given(st.lists(st.floats(), max_size=100), st.integers(1, 30), st.booleans())
def test_any_numbers_can_be_drawn(values: list[float], width: int, logarithmic: bool) -> None:
    drawn = draw_sparkline(np.array(values), width, logarithmic=logarithmic)
    assert len(drawn) <= width
    assert set(drawn) <= {*BLOCKS, " "}


# ---- what is said of the recording, of its troubles and of the model ----


def event(kind: EventKind, step: int = 0, name: str = "", value: float = float("nan"), text: str = "") -> Event:
    return Event(Moment(step), kind, name, value, text)


def test_sites_are_counted_by_what_they_are_of() -> None:
    history = History()
    history.describe(selection=["a.*", "b"], statistics=[])
    places = group_places(["a:weight.grad", "a:output", "a:output.grad", "a:weight.update", "b:output.grad"])
    terms = dict(describe_recorded(replace(choose_scope(history, None, 1000, 8.0), mantissa_bits=9), places))
    assert terms["sites"] == "1 activation, 2 gradients of activations, 1 gradient of a weight, 1 update of a weight"
    assert terms["selection"] == "a.*, b"
    assert terms["tensors kept"] == "none"
    assert terms["numbers on this page"] == "3 significant digits"
    assert "statistics of your own" not in terms


def test_troubles_come_with_their_reasons() -> None:
    manifest = {"not_recorded": [{"site": "a", "reason": "never called"}], "faults": {"b": 7}}
    events = [
        event("fault", 3, "b", text="TypeError: no"),
        event("dropped", 4, "c", text="budget"),
        event("overwritten", 5, "d"),
        event("skipped", 6, "AdamW", text="inf"),
        event("loss", 6, value=1.0),
        event("update", 6, "AdamW"),
    ]
    lost = Rank(1, Path("rank00001"), "failed", {"lost": {"rows": 1200, "events": 0}})
    extra = Rank(0, Path("rank00000.p7"), "finished", {}, is_extra=True)
    tables = {table["title"]: table["rows"] for table in list_troubles(manifest, events, [lost, extra], ["e:output"])}
    assert tables == {
        "Not recorded": [("a", "never called")],
        "Without numbers": [("e:output",)],
        "Faults": [("b", "7", "TypeError: no")],
        "Lost": [("1", "1,200 rows")],
        "Recorded separately": [("0", "rank00000.p7")],
        "Dropped": [("4", "c", "budget")],
        "Overwritten in place": [("5", "d", "")],
        "Skipped updates": [("6", "AdamW", "inf")],
    }


def test_the_loss_scale_is_told_where_it_changes() -> None:
    scales = [65536.0, 65536.0, 32768.0, 32768.0, 65536.0]
    (table,) = list_troubles({}, [event("scale", step, value=scale) for step, scale in enumerate(scales)])
    assert table["rows"] == [("0", "65,536"), ("2", "32,768"), ("4", "65,536")]


def test_the_steps_that_a_budget_has_recorded_are_told_with_the_reason() -> None:
    told = '{"updates":16,"reason":"cost","share":0.0849}'
    gaps = [event("gap", 121, value=2.0, text=told), event("gap", 121, value=2.0, text=told)]  # of two ranks
    gaps.append(event("gap", 300, value=1.0, text='{"reason":"<img>"}'))
    (table,) = list_troubles({}, gaps)
    assert table["rows"] == [
        ("121", "1 of 2", "1 of 16", "what recording costs: 8.5 % expected"),
        ("300", "all", "all", "<img>"),  # of a later version
    ]


def test_long_tables_are_cut_and_say_so() -> None:
    (table,) = list_troubles({}, [event("overwritten", step, "a") for step in range(MOST_LINES + 50)])
    assert (len(table["rows"]), table["more"]) == (MOST_LINES, 50)


def test_parameters_are_added_up_the_tree() -> None:
    model = [
        {"path": "self", "type": "Net", "parameters": 1},
        {"path": "blocks", "type": "Sequential", "parameters": 0},
        {
            "path": "blocks.0",
            "type": "Linear",
            "parameters": 10,
            "settings": "3, 2",
            "shapes": {"weight": [2, 3], "b": []},
        },
        {"path": "blocks.1", "type": "Linear", "parameters": 20, "settings": None, "shapes": "(2,)"},
        {"path": "head", "type": "Linear", "parameters": 5},
    ]
    assert list_modules(model) == [
        (0, "self", "Net", 36, "", ""),
        (1, "blocks", "Sequential", 30, "", ""),
        (2, "blocks.0", "Linear", 10, "3, 2", "weight 2 × 3, b ()"),
        (2, "blocks.1", "Linear", 20, "", ""),
        (1, "head", "Linear", 5, "", ""),
    ]
    assert list_modules(None) == []


def test_the_header_tells_what_the_manifest_knows_and_no_more() -> None:
    manifest = {
        "versions": {"torch": "2.13.0"},
        "git": {"commit": "0123456789abcdef", "dirty": True},
        "started": "2026-11-20T21:14:02+00:00",
        "seed": 0,
    }
    assert make_header(manifest, 3725.0, {"steps": "9"}) == [
        ("started", "2026-11-20 21:14 UTC"),
        ("duration", "1 h 2 min"),
        ("steps", "9"),
        ("torch", "2.13.0"),
        ("git commit", "0123456789ab with changes"),
        ("seed", "0"),
    ]
    assert make_header({}, None, {}) == []
    assert print_command({"command": ["python", "train me.py"]}) == "python 'train me.py'"


ADAM = {"lr": 2e-4, "betas": [0.5, 0.999], "amsgrad": False}
ALIKE = [{"name": name, "type": "Adam", "groups": [ADAM]} for name in ("Adam", "Adam_2")]
SGD = {"name": "SGD", "type": "SGD", "groups": [{"lr": 0.1}, {"lr": 0.2}]}


@pytest.mark.parametrize(
    ("optimizers", "text"),
    [
        (ALIKE[:1], "Adam, lr 0.0002, betas (0.5, 0.999)"),
        (ALIKE, "2 × Adam, lr 0.0002, betas (0.5, 0.999)"),
        ([ALIKE[1], SGD], "Adam, lr 0.0002, betas (0.5, 0.999); SGD, lr 0.1, 0.2"),
        ("Adam", ""),
        ([None], ""),
        (None, ""),
    ],
)
def test_each_optimizer_has_its_own_settings_in_the_header(optimizers: object, text: str) -> None:
    assert dict(make_header({"optimizers": optimizers}, None, {})).get("optimizer", "") == text
