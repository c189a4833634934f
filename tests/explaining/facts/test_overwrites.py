"""What is written to between save and use: both lines, against plain autograd and the lines of this file."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.history.facts import Overwrite, read_facts
from retrograd.core.history.history import History
from retrograd.core.hooks.writes import digest_of
from retrograd.core.recording.recorder import Recorder
from retrograd.explaining.facts.overwrites import OverwriteWatch
from retrograd.explaining.facts.sources import SOURCES
from retrograd.explaining.facts.watches import WATCHES
from retrograd.explaining.findings.record import Record
from tests.explaining.findings.by_hand import ask

Case = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.case = case

    def forward(self, x: Tensor) -> Tensor:
        return self.case(self, x)


def plain(net: Any, x: Tensor) -> Tensor:
    return torch.tanh(net.first(x)).square().mean()


def norm_twice(net: Any, x: Tensor) -> Tensor:
    return (net.norm(net.first(x)) + net.norm(net.first(-x))).square().mean()


def in_place_that_is_fine(net: Any, x: Tensor) -> Tensor:
    y = net.first(x)
    y += 1.0
    return (y.relu_() * 2).mean()  # type: ignore[no-any-return]


def an_index_of_one_element(net: Any, x: Tensor) -> Tensor:
    index = torch.tensor(2).expand(1, 1)  # of stride 0, and contiguous all the same
    return net.first(x).gather(1, index).sum()  # type: ignore[no-any-return]


def saved_input(net: Any, x: Tensor) -> Tensor:
    y = net.first(x)
    z = y.square()  # saves
    y.add_(1.0)  # writes
    return z.sum()  # type: ignore[no-any-return]


def saved_output(net: Any, x: Tensor) -> Tensor:
    y = net.first(x).exp()  # saves
    y *= 2.0  # writes
    return y.sum()  # type: ignore[no-any-return]


def a_leaf(net: Any, x: Tensor) -> Tensor:
    y = net.first.bias * net.first.bias  # saves
    with torch.no_grad():
        net.first.bias.add_(1.0)  # writes
    return y.sum()  # type: ignore[no-any-return]


def through_a_view(net: Any, x: Tensor) -> Tensor:
    y = net.first(x)
    z = y.square()  # saves
    y[0] = 0.0  # writes
    return z.sum() + y.sum()  # type: ignore[no-any-return]


def through_an_alias(net: Any, x: Tensor) -> Tensor:
    y = net.first(x)
    z = y.square()  # saves
    y.detach().zero_()  # writes
    return z.sum()  # type: ignore[no-any-return]


def by_a_function(net: Any, x: Tensor) -> Tensor:
    y = net.first(x).sigmoid()  # saves
    return nn.functional.elu(y, inplace=True).sum() + nn.functional.relu(-y, inplace=True).sum()  # writes


def through_data(net: Any, x: Tensor) -> Tensor:
    y = net.first(x)
    z = y.square()  # saves
    y.data.mul_(3.0)  # writes
    return z.sum()  # type: ignore[no-any-return]


def through_numpy(net: Any, x: Tensor) -> Tensor:
    y = net.first(x)
    z = y.square()  # saves
    values = y.detach().numpy()  # writes
    values[:] = 0.0
    return z.sum()  # type: ignore[no-any-return]


def under_hooks(net: Any, x: Tensor) -> Tensor:
    y = net.first(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
        z = y.square()  # saves
    y.add_(1.0)  # writes
    return z.sum()  # type: ignore[no-any-return]


def under_hooks_that_copy(net: Any, x: Tensor) -> Tensor:
    y = net.first(x)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda each: each.half().float()):
        z = y.square()
    y.add_(1.0)
    return z.sum()  # type: ignore[no-any-return]


def line_of(case: Case, mark: str) -> str:
    lines, first = inspect.getsourcelines(case)
    return f"{__file__}:{first + next(number for number, text in enumerate(lines) if f'# {mark}' in text)}"


def take_steps(net: Net, steps: int) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    kept = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(3, 4))
        loss.backward()
        optimizer.step()
        kept.append(loss.detach())
    return [*kept, *(parameter.detach().clone() for parameter in net.parameters())]


def watch(net: Net, steps: int = 3) -> tuple[list[Overwrite], list[Tensor], Record]:
    history = History()
    recorder = Recorder(net, history, sources=(*SOURCES, *WATCHES))
    recorder.attach()
    kept: list[Tensor] = []
    with suppress(RuntimeError):
        kept = take_steps(net, steps)
    recorder.close()
    assert not [event for event in history.events if event.kind == "fault"]
    record = Record(history)
    return [fact for fact in read_facts(history.events) if isinstance(fact, Overwrite)], kept, record


@pytest.mark.parametrize(
    "case", [plain, norm_twice, in_place_that_is_fine, an_index_of_one_element, under_hooks_that_copy]
)
def test_healthy(case: Case) -> None:
    facts, kept, _ = watch(Net(case))
    assert facts == []
    assert all(map(torch.equal, kept, take_steps(Net(case), 3)))


@pytest.mark.parametrize("case", [saved_input, saved_output, a_leaf, through_a_view, through_an_alias, by_a_function])
def test_what_torch_refuses(case: Case) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as plain_error:
        take_steps(Net(case), 1)
    (fact,), _, record = watch(Net(case))
    assert not fact.silent
    assert (fact.saved_line, fact.written_line) == (line_of(case, "saves"), line_of(case, "writes"))
    assert f"version {fact.found_version}; expected version {fact.saved_version}" in str(plain_error.value)
    (finding,) = ask("overwritten", record)
    assert (finding.severity, finding.line) == ("critical", fact.written_line)


def test_an_update_between_two_passes() -> None:
    net = Net(plain)
    optimizer = torch.optim.Adam(net.parameters())
    history = History()
    recorder = Recorder(net, history, sources=(*SOURCES, OverwriteWatch))
    recorder.attach()
    loss = net(torch.randn(3, 4, requires_grad=True))
    loss.backward(retain_graph=True)
    optimizer.step()
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    recorder.close()
    (fact,) = [fact for fact in read_facts(history.events) if isinstance(fact, Overwrite)]
    assert (fact.tensor, fact.writer, fact.written_line) == ("first:weight", "Adam.step", f"{__file__}:{line}")


@pytest.mark.parametrize("case", [through_data, through_numpy, under_hooks])
def test_what_torch_does_not_see(case: Case) -> None:
    x = torch.randn(3, 4)
    net = Net(case)
    net(x).backward()
    with torch.no_grad():
        y = net.first.bias + x @ net.first.weight.T
    right = 2 * y.sum(0)
    assert net.first.bias.grad is not None
    assert not math.isclose(float((net.first.bias.grad - right).abs().max()), 0.0, abs_tol=1e-4)
    (fact,), kept, record = watch(Net(case))
    assert fact.silent
    assert (fact.saved_line, fact.written_line) == (line_of(case, "saves"), line_of(case, "writes"))
    assert all(map(torch.equal, kept, take_steps(Net(case), 3)))
    (finding,) = ask("overwritten", record)
    assert finding.line == line_of(case, "writes")
    assert "torch does not notice" in finding.message


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_digest_of_a_tensor_that_begins_anywhere_in_its_memory(first: int) -> None:
    tensor = torch.arange(8.0)[first : first + 3]
    assert digest_of(tensor) == zlib.crc32(tensor.numpy().tobytes())
