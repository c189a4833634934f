"""Traces as text, exactly."""

from __future__ import annotations

import io
import math

import pytest

from retrograd.core.errors import NoSuchNodeError, TraceError
from retrograd.following.graph.node import Line, TensorInfo
from retrograd.following.tracing.trace import Trace
from retrograd.following.views.trace_events import LiveLines, format_event, own_memory, own_times
from retrograd.following.views.trace_text import print_trace
from tests.following.views.invented_trace import backward, event, invent_nested, invent_trace, leaf, make_trace

BY_NODE = """\
2 passes, 6 nodes, 0.2 ms
pass 1 raised; the node that began last is blocks.1:SoftmaxBackward0, /home/me/model.py:30 in forward
node                         runs     ms  share  mean µs  memory  norm in  norm out  gradients                                 line
! blocks.1:SoftmaxBackward0     2  0.120  70.6%     60.0   +2 MB      0.5       nan  float32[4, 8] → float32[4, 8]       model.py:30
self:MeanBackward0              2  0.020  11.8%     10.0     0 B        -         -  float32[4, 8] → float32[4, 8]
blocks.0:weight                 1  0.020  11.8%     20.0     0 B        -         -  float32[4, 8]
blocks.0:MulBackward0           1  0.010   5.9%     10.0     0 B        -         -  float32[4, 8] → (float32[4, 8], -)
"""  # noqa: E501


def table(trace: Trace, **options: object) -> list[str]:
    file = io.StringIO()
    print_trace(trace, file=file, **options)  # type: ignore[arg-type]
    assert "\x1b" not in file.getvalue()
    return file.getvalue().splitlines()


def names(lines: list[str]) -> list[str]:
    """First word of each line below the heading."""
    heading = next(place for place, line in enumerate(lines) if " runs " in line)
    return [line.removeprefix("! ").split()[0] for line in lines[heading + 1 :]]


def test_a_piped_table_is_plain_and_whole() -> None:
    def squeeze(lines: list[str]) -> list[str]:
        return [" ".join(line.split()) for line in lines]

    assert squeeze(table(invent_trace())) == squeeze(BY_NODE.splitlines())


def test_by_module_a_parameter_belongs_to_its_module() -> None:
    lines = table(invent_trace(), by="module")
    assert names(lines) == ["blocks.1", "blocks.0", "self"]
    assert lines[4].split()[:3] == ["blocks.0", "2", "0.030"]


def test_by_kind() -> None:
    assert names(table(invent_trace(), by="kind"))[:2] == ["SoftmaxBackward0", "MeanBackward0"]


def test_two_lines_of_one_module_stay_apart() -> None:
    events = [event("MulBackward0", 0, 5, module="net", line=Line("net.py", number, "forward")) for number in (1, 2, 2)]
    assert [line.split()[-1] for line in table(make_trace(events, [backward(0, 0, 15)]))[2:]] == [
        "net.py:2",
        "net.py:1",
    ]


def test_the_node_that_raised_is_never_cut_off() -> None:
    lines = table(invent_trace(), limit=0)
    assert names(lines[:-1]) == ["blocks.1:SoftmaxBackward0"]
    assert lines[-1] == "and 3 more"


def test_a_pattern_chooses() -> None:
    lines = table(invent_trace(), nodes="blocks.0*")
    assert lines[0] == "2 passes, 6 nodes, 2 of them chosen, 0.2 ms"
    assert names(lines) == ["blocks.0:weight", "blocks.0:MulBackward0"]
    assert names(table(invent_trace(), nodes="Mean*")) == ["self:MeanBackward0"]


def test_time_inside_an_inner_pass_is_counted_once() -> None:
    trace = invent_nested()
    assert own_times(trace) == [10_000, 30_000, 20_000, 40_000]
    assert sum(own_times(trace)) == 100_000
    assert table(trace)[0] == "1 pass and 1 inside of them, 4 nodes, 0.1 ms"


def test_memory_inside_an_inner_pass_is_counted_once() -> None:
    trace = invent_nested()
    assert own_memory(trace) == [100, 200, 300, 500]
    assert names(table(trace, sort="memory"))[0] == "self:weight"


def test_memory_of_several_passes_is_that_of_the_largest() -> None:
    events = [leaf("w", 10 * run, 10 * run + 1, run=run, memory=gained) for run, gained in enumerate([5000, 0, -5000])]
    trace = make_trace(events, [backward(run, 10 * run, 10 * run + 1) for run in range(3)])
    assert "+5 kB" in table(trace)[2]


def test_an_empty_trace_has_one_line() -> None:
    assert table(make_trace()) == ["0 passes, 0 nodes, 0.0 ms"]
    assert table(make_trace(), nodes="nothing*", sort="memory") == ["0 passes, 0 nodes, 0.0 ms"]


def test_wrong_wishes_are_refused() -> None:
    with pytest.raises(NoSuchNodeError, match=r"blocks\.1:SoftmaxBackward0"):
        table(invent_trace(), nodes="block.1:Softmax")
    with pytest.raises(TraceError, match="node, module, kind"):
        table(invent_trace(), by="name")
    with pytest.raises(TraceError, match="time, memory"):
        table(invent_trace(), sort="size")
    with pytest.raises(TraceError, match=r"rg\.trace\(memory=True\)"):
        table(make_trace([leaf("w", 0, 1)], [backward(0, 0, 1)]), sort="memory")


def test_a_terminal_without_arrows_gets_plain_letters() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_trace(invent_trace(), file=file)
    file.seek(0)
    assert "float32[4, 8] -> float32[4, 8]" in file.read()


def test_names_are_no_markup_and_no_orders_to_the_terminal() -> None:
    trace = make_trace([leaf("[red]x\x1b[2J", 0, 1)], [backward(0, 0, 1)])
    assert "[red]x\\x1b[2J" in table(trace)[-1]


def test_a_line_says_what_is_known() -> None:
    line = Line("/home/me/model.py", 30, "forward")
    shown = event("SoftmaxBackward0", 0, 132, module="blocks.3.attn", call=2, line=line)
    assert format_event(shown) == (
        "   0.132 ms  blocks.3.attn#2:SoftmaxBackward0  float32[4, 8] → float32[4, 8]  model.py:30"
    )
    many = (TensorInfo((3,), "float32", "cuda:1"), None)
    shown = event("Custom", 0, 1500, incoming=many, memory=-1500, norms_in=(2.0, None), norms_out=(math.nan,))
    assert format_event(shown) == (
        "   1.500 ms  Custom  (float32[3] on cuda:1, -) → float32[4, 8]  norm 2 → nan  -1.5 kB"
    )
    package = Line("/lib/net/__init__.py", 3, "forward")
    assert format_event(leaf("w", 0, 1, line=package, raised=True)) == (
        "   0.001 ms  w  float32[4, 8]  net/__init__.py:3  RAISED"
    )


def test_live_lines_are_chosen_by_place_kind_module_or_parameter() -> None:
    def printed(pattern: str | None) -> int:
        file = io.StringIO()
        live = LiveLines(pattern, file, prefix="rank 1 ")
        for each in invent_trace().events:
            live(each)
        assert all(line.startswith("rank 1 ") for line in file.getvalue().splitlines())
        return file.getvalue().count("\n")

    assert [printed(pattern) for pattern in (None, "blocks.1", "blocks*", "Mean*", "*:weight", "none")] == [
        6, 2, 4, 2, 1, 0,
    ]  # fmt: skip


def test_live_lines_go_to_stderr_and_never_raise(capsys: pytest.CaptureFixture[str]) -> None:
    LiveLines()(leaf("w\x1b", 0, 1))
    assert capsys.readouterr().err == "   0.001 ms  w\\x1b  float32[4, 8]\n"
    closed = io.StringIO()
    closed.close()
    LiveLines(file=closed)(leaf("w", 0, 1))
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    LiveLines(file=plain)(event("Add", 0, 1))
    plain.seek(0)
    assert " -> " in plain.read()
