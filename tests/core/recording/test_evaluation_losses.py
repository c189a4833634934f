"""Losses of evaluations are those that the program itself finds, and nothing else counts for one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.hooks.losses import loss_listeners
from retrograd.core.hooks.native import native

pytestmark = pytest.mark.skipif(native is None, reason="installed without a compiler")


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def data(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 6), torch.randint(3, (size,))


def train(net: nn.Module, evaluate: Callable[[], None], steps: int = 3) -> rg.History:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rg.record(net) as recording:
        for _ in range(steps):
            net.train()
            x, y = data(8)
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            evaluate()
    assert not loss_listeners
    return recording.history


def losses(history: rg.History) -> list[float]:
    return history.scalars["eval_loss"].values.tolist() if "eval_loss" in history.scalars else []


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_module", [True, False])
def test_a_mean_counts_once_a_call(net: nn.Sequential, guard: Callable[[], object], is_module: bool) -> None:
    criterion, expected = nn.CrossEntropyLoss(), []

    def evaluate() -> None:
        net.eval()
        with guard():  # type: ignore[attr-defined]
            found = [(criterion if is_module else F.cross_entropy)(net(x), y).item() for x, y in map(data, (4, 3))]
        expected.append(sum(found) / 2)

    assert losses(train(net, evaluate)) == pytest.approx(expected, rel=1e-6)


def test_a_sum_is_divided_by_all_its_targets(net: nn.Sequential) -> None:
    expected = []

    @torch.no_grad()
    def evaluate() -> None:
        net.eval()
        total = sum(F.nll_loss(net(x).log_softmax(1), y, reduction="sum").item() for x, y in map(data, (4, 3)))
        expected.append(total / 7)

    assert losses(train(net, evaluate)) == pytest.approx(expected, rel=1e-6)


def test_of_several_functions_that_of_training_counts(net: nn.Sequential) -> None:
    expected = []

    @torch.no_grad()
    def evaluate() -> None:
        x, y = data(4)
        out = net(x)
        F.l1_loss(out, torch.zeros_like(out))
        expected.append(F.cross_entropy(out, y).item())

    assert losses(train(net, evaluate)) == pytest.approx(expected, rel=1e-6)


def test_of_several_others_none_does(net: nn.Sequential) -> None:
    @torch.no_grad()
    def evaluate() -> None:
        out = net(data(4)[0])
        F.l1_loss(out, torch.zeros_like(out))
        F.mse_loss(out, torch.zeros_like(out))

    assert losses(train(net, evaluate)) == []


def test_what_is_no_evaluation_does_not_count(net: nn.Sequential) -> None:
    other = nn.Linear(6, 3)

    def evaluate() -> None:
        x, y = data(4)
        with torch.no_grad():
            F.cross_entropy(other(x), y)  # after the update, of a model that is not recorded
        net.eval()
        F.cross_entropy(net(x), y)  # a backward pass may follow
        with torch.no_grad():
            F.cross_entropy(net(x), y, reduction="none")
            thread = threading.Thread(target=torch.no_grad()(lambda: F.cross_entropy(other(x), y)))
            thread.start()
            thread.join()

    assert losses(train(net, evaluate)) == []


def test_a_teacher_in_the_middle_of_a_step_does_not_count(net: nn.Sequential) -> None:
    teacher = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rg.record({"student": net, "teacher": teacher}) as recording:
        for _ in range(3):
            x, y = data(4)
            loss = F.cross_entropy(net(x), y)
            with torch.no_grad():
                F.cross_entropy(teacher(x), y)
            loss.backward()
            optimizer.step()
    assert losses(recording.history) == []


class ReturnsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.linear(x)
        return out, F.cross_entropy(out, y)


def test_what_the_model_returns_counts_alone() -> None:
    model = ReturnsLoss()
    expected = []
    with rg.record(model) as recording, torch.no_grad():
        for _ in range(2):
            x, y = data(4)
            out, loss = model(x, y)
            F.cross_entropy(out * 2, y)
            expected.append(loss.item())
    assert losses(recording.history) == pytest.approx([sum(expected) / 2], rel=1e-6)


def test_recordings_that_end_in_any_order_take_what_is_theirs(net: nn.Sequential) -> None:
    first, second = rg.record(net), rg.record(net)
    with torch.no_grad():
        x, y = data(4)
        expected = F.cross_entropy(net(x), y).item()
        first.close()
        F.cross_entropy(net(x) * 3, y)
        second.close()
    assert losses(first.history) == pytest.approx([expected])
    assert losses(second.history) != pytest.approx([expected])
    assert not loss_listeners
