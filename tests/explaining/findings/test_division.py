"""Losses of micro-batches, in loops that accumulate: divided by their number, or not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrograd as rg
from retrograd.explaining.findings import explain
from retrograd.explaining.findings.record import CannotTell, Record
from tests.explaining.findings.by_hand import ask, check
from tests.explaining.findings.programs import make_calls, make_chain, make_program

MICRO = 4
ALL = torch.tensor(32.0)
"""Samples of an update, counted before it."""

Loss = Callable[[Tensor, Tensor], Tensor]


def _train(
    make_loss: Loss,
    backward: Callable[[Tensor], None] = lambda loss: loss.backward(),
    behind: Callable[[nn.Module], None] = lambda net: None,
    rules: Callable[[nn.Module], AbstractContextManager[object]] = lambda net: nullcontext(),
    update: Callable[[torch.optim.Optimizer], object] = lambda optimizer: optimizer.step(),
    clears_each: bool = False,
    **options: float,
) -> Record:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, **options)
    with rg.record(net) as recording, rules(net):
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(MICRO):
                if clears_each:
                    optimizer.zero_grad()
                backward(make_loss(net(torch.randn(8, 4)), torch.randint(3, (8,))))
            behind(net)
            update(optimizer)
    return explain.make_record(recording)


def _plain(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def _divided(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target) / MICRO


def _sum(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="sum")


def _masked(logits: Tensor, target: Tensor) -> Tensor:
    mask = (target > 0).float()
    return (F.cross_entropy(logits, target, reduction="none") * mask).sum() / mask.sum()


WHOLE: dict[str, Loss] = {
    "plain": _plain,
    "by hand": lambda logits, target: -F.log_softmax(logits, -1).gather(1, target[:, None]).mean(),
    "a sum over its samples": lambda logits, target: _sum(logits, target) / len(target),
    "a mean over the tokens that count": _masked,
    "with a term beside": lambda logits, target: _plain(logits, target) + 0.1 * logits.square().mean(),
    "larger": lambda logits, target: 2 * _plain(logits, target),
}
DIVIDED: dict[str, Loss] = {
    "divided": _divided,
    "multiplied": lambda logits, target: _plain(logits, target).mul_(1 / MICRO),
    "weighed besides": lambda logits, target: 0.3 * _plain(logits, target) / MICRO,
    "each term": lambda logits, target: _divided(logits, target) + 0.1 * logits.square().mean() / MICRO,
    "tokens that count": lambda logits, target: _masked(logits, target) / MICRO,
    "by all samples": lambda logits, target: _sum(logits, target) / 32,
    "by all tokens": lambda logits, target: _sum(logits, target) / 29,
    "summed": _sum,
}
TERMS = 2000
"""More than functions that call themselves may go deep."""

UNKNOWN: dict[str, tuple[Loss, str]] = {
    "weighed": (lambda logits, target: 0.5 * _plain(logits, target), "multiplied by 0.5, and not by 1/4"),
    "a tensor": (lambda logits, target: _sum(logits, target) / ALL, "divided by a tensor, which may count"),
    "a count": (lambda logits, target: _sum(logits, target) / 5, "a sum times 0.2, by a count of"),
    "a root": (lambda logits, target: _plain(logits, target).sqrt(), "begins from what `sqrt` makes"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_loss_that_is_not_divided(name: str) -> None:
    [found] = ask("accumulation-not-divided", _train(WHOLE[name]))
    assert "no loss is divided by 4: the learning rate is 4 times that of the mean" in found.message


@pytest.mark.parametrize("name", DIVIDED)
def test_a_loss_that_is_divided(name: str) -> None:
    assert check("accumulation-not-divided", _train(DIVIDED[name])) == []


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_loss_of_which_it_is_not_known(name: str) -> None:
    loss, reason = UNKNOWN[name]
    with pytest.raises(CannotTell, match=reason):
        check("accumulation-not-divided", _train(loss))


def test_a_loss_of_many_terms() -> None:
    terms = [("mean", (-1,), ((8,),), ()), *(("add", (k, k), ((), ()), ()) for k in range(TERMS))]
    calls = make_calls([(*("forward", "backward") * MICRO, "step")] * 3)
    assert len(ask("accumulation-not-divided", make_program([make_chain(*terms, outputs=[]), *calls]))) == 1
    divided = make_chain(*terms, ("div", (TERMS,), ((),), (), str(MICRO)), outputs=[])
    assert check("accumulation-not-divided", make_program([divided, *calls])) == []
    summed = make_chain(("sum", (-1,), ((8,),), ()), *terms[1:], outputs=[])
    assert check("accumulation-not-divided", make_program([summed, *calls])) == []


def _train_scaled(make_loss: Loss, divisor: float) -> Record:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def backward(loss: Tensor) -> None:
        scaled = scaler.scale(loss)
        (scaled / divisor if divisor else scaled).backward()

    def update(optimizer: torch.optim.Optimizer) -> None:
        scaler.step(optimizer)
        scaler.update()

    return _train(make_loss, backward, update=update)


def test_a_loss_that_a_scaler_multiplies() -> None:
    assert len(ask("accumulation-not-divided", _train_scaled(_plain, 0))) == 1
    assert check("accumulation-not-divided", _train_scaled(_divided, 0)) == []
    assert check("accumulation-not-divided", _train_scaled(_plain, MICRO)) == []


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.01}, {"momentum": 0.9}], ids=str)
def test_gradients_that_are_divided_behind_backward(options: dict[str, float]) -> None:
    def divide(net: nn.Module) -> None:
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad /= MICRO

    assert check("accumulation-not-divided", _train(_plain, behind=divide, **options)) == []
    assert len(ask("accumulation-not-divided", _train(_plain, **options))) == 1


@pytest.mark.parametrize("site", ["*:parameters.grad", "1:output.grad"])
def test_rules_may_divide(site: str) -> None:
    def divide(net: nn.Module) -> AbstractContextManager[object]:
        return rg.rewrite(net, {site: rg.rules.Scale(1 / MICRO)})

    with pytest.raises(CannotTell, match="rules change gradients"):
        check("accumulation-not-divided", _train(_plain, rules=divide))


def test_a_loss_that_is_weighed_tells_nothing_of_passes_that_are_cleared() -> None:
    for loss in (_plain, _sum, UNKNOWN["weighed"][0], UNKNOWN["a count"][0]):
        [found] = ask("step-too-seldom", _train(loss, clears_each=True))
        assert "Most gradients are thrown away: of 12 backward passes, 9" in found.message
    with pytest.raises(CannotTell, match="meant to be accumulated"):
        check("step-too-seldom", _train(_divided, clears_each=True))
