"""Chrome traces, read by the rules of the format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from retrograd.core.errors import TraceError
from retrograd.following.graph.node import Line
from retrograd.following.tracing.trace import Trace
from retrograd.following.views.chrome_trace import _print_time, write_chrome_trace
from tests.core.views.chrome_rules import Content, read_checked
from tests.following.views.invented_trace import (
    THREAD,
    backward,
    call,
    event,
    invent_nested,
    invent_trace,
    leaf,
    make_trace,
)


def show(trace: Trace | list[Trace], folder: Path, name: str = "trace.json") -> Content:
    return read_checked(write_chrome_trace(trace, folder / name))


def paths(content: Content) -> set[tuple[str, ...]]:
    return {tuple(each.path) for each in content.slices}


def links(content: Content) -> list[tuple[str, str]]:
    return [(start.name, end.name) for start, end in content.arrows]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_calls_passes_and_nodes_nest(name: str, tmp_path: Path) -> None:
    content = show(invent_trace(), tmp_path, name)
    assert paths(content) == {
        ("self",),
        ("self", "blocks.0"),
        ("self", "blocks.1"),
        ("backward pass 0",),
        ("backward pass 0", "self:MeanBackward0"),
        ("backward pass 0", "blocks.1:SoftmaxBackward0"),
        ("backward pass 0", "blocks.0:MulBackward0"),
        ("backward pass 0", "blocks.0:weight"),
        ("backward pass 1",),
        ("backward pass 1", "self:MeanBackward0"),
        ("backward pass 1", "blocks.1:SoftmaxBackward0"),
    }
    assert len(content.slices) == 14
    assert not list(tmp_path.glob(f"[!t]*{name}*"))


def test_times_are_kept_to_the_nanosecond(tmp_path: Path) -> None:
    first, *_ = show(invent_trace(), tmp_path).slices
    assert (first.begin, first.end) == (0, 100_000)
    trace = make_trace([event("Add", 0, 0)], [backward(0, 10**12, 10**12 + 7)])
    content = show(trace, tmp_path)
    assert content.slices[-1].begin - content.slices[0].begin == 10**15
    assert content.slices[-1].end - content.slices[-1].begin == 7000


def test_an_arrow_leads_from_the_call_that_made_a_node(tmp_path: Path) -> None:
    content = show(invent_trace(), tmp_path)
    assert links(content) == [
        ("self", "self:MeanBackward0"),
        ("blocks.1", "blocks.1:SoftmaxBackward0"),
        ("blocks.0", "blocks.0:MulBackward0"),
        ("self", "self:MeanBackward0"),
        ("blocks.1", "blocks.1:SoftmaxBackward0"),
    ]
    assert [start.begin // 1000 for start, _ in content.arrows] == [0, 50, 10, 500, 550]


def test_no_arrow_where_the_call_is_not_known(tmp_path: Path) -> None:
    forwards = [call("net", 0, 10, (0, 5)), call("net", 0, 9, (0, 5), thread=1), call("late", 90, 99, (0, 5))]
    events = [
        event("Outside", 20, 21, number=3),
        event("Unnumbered", 21, 22, number=9, module="net"),
        event("Early", 22, 23, number=3, module="late"),
        event("SecondCall", 23, 24, number=3, module="net", call=2),
        leaf("net:weight", 24, 25, module="net"),
    ]
    assert not show(make_trace(events, [backward(0, 20, 25)], forwards), tmp_path).arrows


def test_the_same_numbers_in_two_threads(tmp_path: Path) -> None:
    """Each thread counts for itself; the module says more, and then the later call."""
    forwards = [
        call("net", 0, 10, (0, 5)),
        call("other", 2, 12, (0, 5), thread=1),
        call("net", 15, 18, (0, 5), thread=2),
    ]
    events = [event("A", 20, 21, number=3, module="other"), event("B", 21, 22, number=3, module="net")]
    content = show(make_trace(events, [backward(0, 20, 22)], forwards), tmp_path)
    assert links(content) == [("other", "other:A"), ("net", "net:B")]
    assert content.arrows[1][0].begin == 15_000
    assert len({number for what, _, number in content.names if what == "thread_name"}) == 3


def test_a_pass_inside_a_node_and_a_recomputed_forward(tmp_path: Path) -> None:
    content = show(invent_nested(), tmp_path)
    outer = ("backward pass 0", "CheckpointFunctionBackward")
    assert paths(content) >= {
        (*outer, "self"),
        (*outer, "backward pass 1 (inner)", "MulBackward0"),
        (*outer, "backward pass 1 (inner)", "self:weight"),
    }
    assert [each.event["cat"] for each in content.slices if each.name == "self"] == ["recompute"]
    assert content.counters["memory gained in the pass"] == [0, 100, 400, 900, 1100]


def test_the_curve_of_memory_begins_anew_in_each_pass(tmp_path: Path) -> None:
    events = [leaf("w", 10 * run, 10 * run + 5, run=run, memory=8) for run in range(2)]
    trace = make_trace(events, [backward(run, 10 * run, 10 * run + 6) for run in range(2)])
    assert show(trace, tmp_path).counters["memory gained in the pass"] == [0, 8, 0, 8]
    assert not show(make_trace([leaf("w", 0, 1)], [backward(0, 0, 1)]), tmp_path).counters


def test_details(tmp_path: Path) -> None:
    content = show(invent_trace(), tmp_path)
    softmax = next(each for each in content.slices if each.name == "blocks.1:SoftmaxBackward0")
    assert softmax.event["args"] == {
        "kind": "SoftmaxBackward0",
        "number": 2,
        "module": "blocks.1",
        "line": "/home/me/model.py:30 in forward",
        "operation": "softmax",
        "incoming": ["float32[4, 8]"],
        "outgoing": ["float32[4, 8]"],
        "norms in": [0.5],
        "norms out": ["nan"],
        "memory": 2_000_000,
    }
    mul = next(each for each in content.slices if each.name == "blocks.0:MulBackward0")
    assert mul.event["args"]["outgoing"] == ["float32[4, 8]", None]
    failed = [each.event["name"] for each in content.slices if "cname" in each.event]
    assert failed == ["backward pass 1", "blocks.1:SoftmaxBackward0"]


def test_ranks_are_processes_on_one_clock(tmp_path: Path) -> None:
    """The clocks of two machines count from different moments."""
    late = invent_trace(rank=1, epoch=invent_trace().epoch + 5_000)
    content = show([invent_trace(), late], tmp_path)
    begins = [next(each.begin for each in content.slices if each.event["pid"] == rank) for rank in (0, 1)]
    assert begins == [0, 5_000]
    assert content.names["process_name", 1, 0] == "rank 1"


def test_two_traces_of_one_rank_stand_side_by_side(tmp_path: Path) -> None:
    content = show([invent_trace(), invent_trace()], tmp_path)
    assert {each.event["pid"] for each in content.slices} == {0, 1}
    assert len(content.arrows) == 10


def test_nothing_seen_is_a_valid_trace(tmp_path: Path) -> None:
    assert not show(make_trace(), tmp_path).slices


@pytest.mark.parametrize("path", ["trace.txt", "trace.pftrace", "trace.gz", "no/such/folder/trace.json"])
def test_a_path_that_will_not_do(path: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError):
        write_chrome_trace(invent_trace(), tmp_path / path)
    assert not list(tmp_path.iterdir())


def test_no_trace_at_all(tmp_path: Path) -> None:
    with pytest.raises(TraceError):
        write_chrome_trace([], tmp_path / "trace.json")


@given(some.integers(0, 2**53))
def test_no_nanosecond_is_lost_in_perfetto(time: int) -> None:
    assert int(_print_time(time) * 1000) == time if time < 2**49 else True
    written = json.loads(json.dumps(_print_time(time)))
    assert abs(written * 1000 - time) <= 1


TIMES = some.integers(0, 30)


@settings(max_examples=60, deadline=None)
@given(some.lists(some.tuples(TIMES, TIMES, some.sampled_from("pec"), some.integers(0, 1))))
def test_whatever_overlaps_is_made_to_nest(tmp_path_factory: pytest.TempPathFactory, drawn: list) -> None:
    trace = make_trace()
    for begin, length, kind, thread in drawn:
        where = {"thread": THREAD + thread}
        if kind == "p":
            trace.passes.append(backward(len(trace.passes), begin, begin + length, **where))
        elif kind == "c":
            trace.forwards.append(call(f"m{length}", begin, begin + length, (begin, begin + length), **where))
        else:
            line = Line("net.py", begin, "forward")
            trace.events.append(
                event("Add", begin, begin + length, number=begin, module=f"m{length}", line=line, memory=1, **where)
            )
    trace.passes = trace.passes or [backward(0, 0, 60)]
    content = show(trace, tmp_path_factory.getbasetemp())
    assert len(content.slices) == len(trace.passes) + len(trace.forwards) + len(trace.events)
