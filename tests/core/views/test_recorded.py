"""What is said of the recording, of its troubles and of the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from retrograd.core.history.history import History
from retrograd.core.history.sink import Event, EventKind, Moment
from retrograd.core.runs.reader import Rank
from retrograd.core.views.report.facts import (
    MOST_LINES,
    describe_recorded,
    list_modules,
    list_troubles,
    make_header,
    print_command,
)
from retrograd.core.views.report.scope import choose_scope
from retrograd.core.views.shown import group_places


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


def test_long_tables_are_cut_and_say_so() -> None:
    (table,) = list_troubles({}, [event("overwritten", step, "a") for step in range(MOST_LINES + 50)])
    assert (len(table["rows"]), table["more"]) == (MOST_LINES, 50)


def test_parameters_are_added_up_the_tree() -> None:
    model = [
        {"path": "self", "type": "Net", "parameters": 1},
        {"path": "blocks", "type": "Sequential", "parameters": 0},
        {"path": "blocks.0", "type": "Linear", "parameters": 10},
        {"path": "blocks.1", "type": "Linear", "parameters": 20},
        {"path": "head", "type": "Linear", "parameters": 5},
    ]
    assert list_modules(model) == [
        (0, "self", "Net", 36),
        (1, "blocks", "Sequential", 30),
        (2, "blocks.0", "Linear", 10),
        (2, "blocks.1", "Linear", 20),
        (1, "head", "Linear", 5),
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
        ("started", "20 Nov 2026, 21:14 UTC"),
        ("duration", "1 h 2 min"),
        ("steps", "9"),
        ("torch", "2.13.0"),
        ("git commit", "0123456789ab with changes"),
        ("seed", "0"),
    ]
    assert make_header({}, None, {}) == []
    assert print_command({"command": ["python", "train me.py"]}) == "python 'train me.py'"
