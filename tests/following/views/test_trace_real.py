"""Views of traces that were really made."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from retrograd.following.tracing.trace import Trace
from retrograd.following.tracing.tracer import trace
from retrograd.following.views.chrome_trace import write_chrome_trace
from retrograd.following.views.trace_events import LiveLines, own_times
from retrograd.following.views.trace_text import print_trace
from tests.core.views.chrome_rules import read_checked


class Inner(torch.autograd.Function):
    """Runs a pass of its own inside of its backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return gradient * torch.autograd.grad(x.square().sum(), x)[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.act = nn.Tanh()

    def forward(self, x):
        return Inner.apply(self.shared(self.act(self.shared(x))))


def run(net: nn.Module) -> None:
    for _ in range(2):
        net(torch.randn(3, 4)).sum().backward()


@pytest.fixture(scope="module")
def seen() -> tuple[Trace, str]:
    lines = io.StringIO()
    with trace(norms=True, memory=True, live=LiveLines(file=lines)) as made:
        net = Net()
        run(net)
        thread = threading.Thread(target=run, args=(net,))
        thread.start()
        thread.join()
    return made, lines.getvalue()


def test_every_node_with_a_module_has_an_arrow_from_its_call(seen: tuple[Trace, str], tmp_path: Path) -> None:
    made, _ = seen
    content = read_checked(write_chrome_trace(made, tmp_path / "trace.json"))
    outer = {run.number for run in made.passes if not run.depth}  # inside, nodes are run that the backward has made
    linked = [event for event in made.events if event.run in outer and event.module and event.number is not None]
    assert linked
    assert [(end.name, start.name) for start, end in content.arrows] == [
        (event.place, f"{event.module}#{event.call}" if event.call > 1 else event.module) for event in linked
    ]
    assert len({start.event["tid"] for start, _ in content.arrows}) == 2
    assert all(start.event["tid"] == end.event["tid"] for start, end in content.arrows)


def test_slices_are_the_events(seen: tuple[Trace, str], tmp_path: Path) -> None:
    made, _ = seen
    content = read_checked(write_chrome_trace(made, tmp_path / "trace.json"))
    nodes = [each for each in content.slices if each.event["cat"] == "backward"]
    assert sorted((each.name, each.end - each.begin) for each in nodes) == sorted(
        (event.place, event.end - event.begin) for event in made.events
    )
    inner = [each for each in content.slices if each.name.endswith("(inner)")]
    assert len(inner) == 4
    assert all(each.parent is not None and each.parent.name == "self:InnerBackward" for each in inner)


def test_own_times_fill_no_more_than_the_passes(seen: tuple[Trace, str]) -> None:
    made, _ = seen
    assert min(own_times(made)) >= 0
    assert sum(own_times(made)) <= sum(run.end - run.begin for run in made.passes if not run.depth)


def test_table_and_lines_show_every_node(seen: tuple[Trace, str]) -> None:
    made, lines = seen
    file = io.StringIO()
    print_trace(made, limit=None, file=file)
    assert lines.count("\n") == len(made.events)
    for event in made.events:
        assert event.place in file.getvalue()
        assert event.place in lines


def test_a_trace_that_was_saved_looks_the_same(seen: tuple[Trace, str], tmp_path: Path) -> None:
    made, _ = seen
    loaded = Trace.load(made.save(tmp_path / "trace.json.gz"))
    first, second = (
        write_chrome_trace(each, tmp_path / f"{n}.json").read_bytes() for n, each in enumerate((made, loaded))
    )
    assert first == second
