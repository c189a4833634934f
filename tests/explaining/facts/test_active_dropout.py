import linecache
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.history.facts import ActiveDropout
from tests.explaining.facts.looking import facts_of, line_of


class Net(nn.Module):
    def __init__(self, drop: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Inner(drop)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


class Inner(nn.Module):
    def __init__(self, drop: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.drop, self.module = drop, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self, x)


def always(module: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(x, 0.25)


def attention(module: nn.Module, x: Tensor) -> Tensor:
    rows = x[:, None]
    return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.125)[:, 0]


def switched(module: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(x, 0.25, training=module.training)


def meant(module: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(x, 0.25, training=True)


def nothing(module: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(x, 0.0)


def as_module(module: nn.Module, x: Tensor) -> Tensor:
    return module.module(x)  # type: ignore[no-any-return]


def train(drop: Callable[[nn.Module, Tensor], Tensor], *, samples: bool = False) -> tuple[list[ActiveDropout], Tensor]:
    """What is noted of a training with three evaluations, and what the last one gave."""
    torch.manual_seed(0)
    model = Net(drop)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    out = torch.empty(0)
    with rg.record(model) as recording:
        for _ in range(3):
            model.train()
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.eval()
            if samples:
                model.inner.module.train()
            with torch.no_grad():
                out = model(torch.randn(4, 8))
    return facts_of(recording, ActiveDropout), out


@pytest.mark.parametrize(("drop", "share"), [(always, 0.25), (attention, 0.125)])
def test_what_drops_in_eval_mode_is_noted_once(drop: Callable[[nn.Module, Tensor], Tensor], share: float) -> None:
    found, _ = train(drop)
    operation = "dropout" if drop is always else "scaled_dot_product_attention"
    assert [(fact.name, fact.operation, fact.value) for fact in found] == [("inner", operation, share)]
    assert found[0].line == line_of("F.", drop)


@pytest.mark.parametrize("drop", [switched, meant, nothing, as_module])
def test_what_drops_nothing_or_is_meant_is_not(drop: Callable[[nn.Module, Tensor], Tensor]) -> None:
    linecache.checkcache()
    assert not train(drop)[0]


def test_a_module_that_is_switched_on_for_samples_is_not() -> None:
    assert not train(as_module, samples=True)[0]


def test_what_evaluation_draws_is_as_without() -> None:
    _, recorded = train(always)
    torch.manual_seed(0)
    model = Net(always)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model.train()
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            out = model(torch.randn(4, 8))
    assert torch.equal(out, recorded)
