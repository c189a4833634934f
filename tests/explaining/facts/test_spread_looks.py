"""How far samples are apart in what a model returns, against numpy."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from retrograd.core.history.facts import Spread
from tests.explaining.facts.looking import facts_while


class Pair(nn.Module):
    """Returns two tensors, of which the second is the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.layer(x)
        self.seen.append((x, out.detach()))
        return {"own": out, "same": out.mean(0, keepdim=True).expand(len(x), -1)}


def spread_of(values: Tensor) -> float:
    rows = values.double().numpy().reshape(len(values), -1)
    return float(((rows - rows.mean(0)) ** 2).sum() / (rows**2).sum())


def train(model: nn.Module, batches: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        sum(each.square().mean() for each in model(batch).values()).backward()
        optimizer.step()


def test_the_spread_of_outputs_and_of_the_input() -> None:
    torch.manual_seed(0)
    model = Pair()
    found = facts_while(lambda: train(model, [torch.randn(8, 6) + 1 for _ in range(3)]), model, Spread)
    own, same = found[::2], found[1::2]
    assert [fact.step for fact in own] == [0, 1, 2]
    assert [fact.name for fact in found[:2]] == ["self:output.own", "self:output.same"]
    for fact, (x, out) in zip(own, model.seen, strict=True):
        assert fact.value == pytest.approx(spread_of(out))
        assert fact.given == pytest.approx(spread_of(x))
        assert fact.size == pytest.approx(float(np.sqrt((out.double().numpy() ** 2).mean())))
        assert fact.samples == 8
    assert all(fact.value < 1e-12 for fact in same)


def test_one_sample_has_no_spread() -> None:
    model = Pair()
    assert not facts_while(lambda: train(model, [torch.randn(1, 6)]), model, Spread)
    assert len(model.seen) == 1


def test_an_input_of_another_number_of_rows_is_left_out() -> None:
    class Repeats(Pair):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"own": self.layer(x).repeat(3, 1)}

    model = Repeats()
    [fact] = facts_while(lambda: train(model, [torch.randn(4, 6)]), model, Spread)
    assert fact.samples == 12
    assert math.isnan(fact.given)
