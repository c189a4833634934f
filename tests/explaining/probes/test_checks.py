"""Which samples and positions depend on others: held against gradients by plain torch, and against what is known."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.errors import ProbeError
from tests.explaining.facts.looking import line_of


class Along(nn.Module):
    """Attention with a softmax along a dimension of [samples · queries, keys]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.key, self.out = dim, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.bmm(x, self.key(x).transpose(1, 2)).flatten(0, 1)
        weights = scores.softmax(self.dim).view(len(x), -1, x.size(1))  # mixes
        return self.out(torch.bmm(weights, x)).mean(1)  # type: ignore[no-any-return]


class Sequential(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 4, **options), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


class Rows(nn.Module):
    """A reshape without the permute that would bring positions behind samples."""

    def __init__(self, *, is_right: bool) -> None:
        super().__init__()
        self.is_right, self.fc = is_right, nn.Linear(30, 3)

    def forward(self, x: Tensor) -> Tensor:
        along = x.transpose(0, 1)  # as for a recurrent layer
        back = along.transpose(0, 1) if self.is_right else along
        return self.fc(back.reshape(len(x), -1))  # type: ignore[no-any-return]  # mixes


class HandNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / x.std(0)


class Counts(nn.Module):
    """It returns something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2))


def gradients_mix(model: nn.Module, x: Tensor) -> set[tuple[int, int]]:
    """Pairs (i, j), i ≠ j, such that the output of i has a gradient with respect to the input of j."""
    x = x.clone().requires_grad_()
    found = set()
    torch.manual_seed(0)
    output = model(x)
    for i, each in enumerate(output):
        (gradient,) = torch.autograd.grad(each.sum(), x, retain_graph=True)
        found |= {(i, j) for j in range(len(x)) if j != i and bool(gradient[j].any())}
    return found


MIXED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "softmax": (lambda: Along(0), (4, 5, 6), "softmax"),
    "lstm": (Sequential, (4, 5, 6), "lstm"),
    "reshape": (lambda: Rows(is_right=False), (4, 6, 5), "reshape"),
    "by hand": (HandNorm, (4, 6), "mean"),
}


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_mix_are_found_with_the_operation(name: str) -> None:
    make, shape, operation = MIXED[name]
    torch.manual_seed(1)
    model, x = make(), torch.randn(shape)
    found = rg.check_batch(model, x)
    assert not found
    assert found.mixes
    assert set(found.pairs) <= gradients_mix(model, x)
    assert found.operation == operation


def test_the_line_is_that_of_the_operation() -> None:
    found = rg.check_batch(Along(0), torch.randn(4, 5, 6))
    assert found.line == line_of("# mixes", Along)
    assert str(found).startswith("samples depend on other samples (")


APART: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "softmax": (lambda: Along(-1), (4, 5, 6)),
    "lstm": (lambda: Sequential(batch_first=True), (4, 5, 6)),
    "reshape": (lambda: Rows(is_right=True), (4, 6, 5)),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), (4, 6)),
    "evaluation": (lambda: with_norm().eval(), (4, 6)),
    "transformer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), (4, 5, 6)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), (4, 3, 6, 6)),
}


@pytest.mark.parametrize("name", APART)
def test_samples_that_do_not_mix_are_not_said_to(name: str) -> None:
    make, shape = APART[name]
    model, x = make(), torch.randn(shape)
    assert not gradients_mix(model, x)
    found = rg.check_batch(model, x)
    assert found
    assert not found.mixes
    assert found.pairs == ()


def test_batch_norm_in_training_is_told_apart() -> None:
    found = rg.check_batch(with_norm(), torch.randn(4, 6))
    assert found
    assert found.mixes
    assert found.only_batch_norm
    both = rg.check_batch(nn.Sequential(nn.BatchNorm1d(6), HandNorm()), torch.randn(4, 6))
    assert not both
    assert both.operation == "mean"
    functional = rg.check_batch(_Functional(), torch.randn(4, 6))
    assert functional.only_batch_norm


class _Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


def test_positions_along_the_first_dimension_are_named_by_it() -> None:
    model = nn.LSTM(6, 4)  # time first
    assert not rg.check_batch(model, torch.randn(5, 4, 6))
    assert rg.check_batch(model, torch.randn(5, 4, 6), dim=1)


# ---- positions ----


class Decoder(nn.Module):
    """Attention by hand; ``mask`` says what is done to the scores."""

    def __init__(self, mask: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mask, self.embed, self.head = mask, nn.Embedding(11, 6), nn.Linear(6, 11)
        self.register_buffer("hidden", torch.ones(9, 9, dtype=torch.bool).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        scores = self.mask(x @ x.transpose(1, 2), self.hidden)
        return self.head(scores.softmax(-1) @ x)  # type: ignore[no-any-return]


def right(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores.masked_fill(hidden, -torch.inf)


def dropped(scores: Tensor, hidden: Tensor) -> Tensor:
    scores.masked_fill(hidden, -torch.inf)  # dropped
    return scores


def one_late(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores.masked_fill(hidden.triu(2), -torch.inf)


def tokens() -> Tensor:
    return torch.stack([torch.randperm(11)[:9] for _ in range(4)])


def test_a_causal_model_sees_no_later_position() -> None:
    found = rg.check_causal(Decoder(right), tokens())
    assert found
    assert not found.mixes
    assert found.has_mask


def test_a_mask_whose_result_is_dropped_is_named() -> None:
    found = rg.check_causal(Decoder(dropped), tokens())
    assert not found
    assert (0, 8) in found.pairs
    assert (8, 0) not in found.pairs
    assert (found.operation, found.line) == ("masked_fill", line_of("# dropped", dropped))


def test_a_mask_that_is_one_late_lets_one_position_in() -> None:
    found = rg.check_causal(Decoder(one_late), tokens())
    assert {(position, place) for position, place in found.pairs} == {(0, 1), (3, 4), (4, 5), (7, 8)}


def test_a_convolution_that_is_padded_on_both_sides_sees_the_future() -> None:
    model = nn.Sequential(nn.Conv1d(6, 6, 3, padding=1), nn.ReLU())
    assert not rg.check_causal(model, torch.randn(2, 6, 8), dim=2)
    left = nn.Sequential(nn.ZeroPad1d((2, 0)), nn.Conv1d(6, 6, 3))
    assert rg.check_causal(left, torch.randn(2, 6, 8), dim=2)


# ---- batches ----


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.fc(x if mask is None else x * mask[:, None])}


class Whole(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["image"] * 2


def test_what_the_model_is_called_with_is_said() -> None:
    x, y = torch.randn(4, 6), torch.ones(4)
    assert rg.check_batch(nn.Linear(6, 2), (x, y)).called_with == "float32[4, 6]"
    assert rg.check_batch(Named(), (x, y)).called_with == "float32[4, 6], float32[4]"
    assert rg.check_batch(Named(), {"x": x, "mask": y, "labels": y}).called_with == "x=float32[4, 6], mask=float32[4]"
    assert rg.check_batch(Whole(), {"image": x, "label": y}).called_with == "dict"


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no model": (3, torch.randn(4, 6), "not a torch.nn.Module"),
    "no tensor": (nn.Linear(6, 2), "text", "no tensor"),
    "one sample": (nn.Linear(6, 2), torch.randn(1, 6), "has size 1"),
    "all the same": (nn.Linear(6, 2), torch.ones(4, 6), "the same"),
    "one number": (nn.MSELoss(), (torch.randn(4, 6), torch.randn(4, 6)), "nothing with a dimension of size 4"),
    "counts": (Counts(), torch.randn(4, 6), "something else"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_answered_raises(name: str) -> None:
    model, batch, words = REFUSED[name]
    with pytest.raises(ProbeError, match=words):
        rg.check_batch(model, batch)


# ---- nothing is changed ----


class Fails(nn.Module):
    """It fails when another sample comes first."""

    def __init__(self, first: Tensor) -> None:
        super().__init__()
        self.norm, self.first = nn.BatchNorm1d(6), first

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x) + torch.rand(())
        if not torch.equal(x[0], self.first):
            raise RuntimeError("another sample")
        return found


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_the_random_state_stay_as_they_are(fails: bool) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    model = Fails(x[0].detach().clone()) if fails else with_norm()
    model.register_forward_hook(lambda module, args, output: None)
    model(x).sum().backward()
    before = (
        copy.deepcopy(model.state_dict()),
        [each.grad.clone() for each in model.parameters() if each.grad is not None],
    )
    hooks, given, grad, state = len(model._forward_hooks), x.detach().clone(), x.grad, torch.get_rng_state()
    for ask in (rg.check_batch, rg.find_nan):
        if fails and ask is rg.check_batch:
            with pytest.raises(RuntimeError, match="another sample"):
                ask(model, x)
        else:
            ask(model, x)
    after = model.state_dict(), [each.grad for each in model.parameters() if each.grad is not None]
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert all(torch.equal(one, other) for one, other in zip(before[1], after[1], strict=True))
    assert all(each.training for each in model.modules())
    assert all(each.requires_grad for each in model.parameters())
    assert len(model._forward_hooks) == hooks
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x.detach(), given)
    assert x.grad is grad


def test_a_recording_has_the_same_rows_and_events() -> None:
    def train(ask: Callable[[nn.Module], Any]) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        model = with_norm()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with rg.record(model) as recording:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(4, 6)).sum().backward()
                ask(model)
                optimizer.step()
        return recording.history, list(model.parameters())

    x = torch.randn(4, 6)
    plain, weights = train(lambda model: None)
    asked, same = train(lambda model: (rg.check_batch(model, x), rg.find_nan(model, x)))
    assert all(torch.equal(one, other) for one, other in zip(weights, same, strict=True))
    assert plain.rows.count == asked.rows.count
    kinds = [Counter(event.kind for event in each.events if event.name != "memory") for each in (plain, asked)]
    assert kinds[0] == kinds[1]


# ---- the first NaN ----


class Breaks(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.how = nn.Linear(6, 6), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.fc(x))


def test_the_first_operation_is_found_in_both_directions() -> None:
    x = torch.randn(4, 6)
    forward = rg.find_nan(Breaks(lambda h: (h * 0).log()), x)
    assert forward is not None
    assert (forward.born, forward.operation, forward.reason) == ("forward", "log", "log of 0")
    backward = rg.find_nan(Breaks(lambda h: (h * 0).abs().sqrt()), x)
    assert backward is not None
    assert (backward.born, backward.operation) == ("backward", "sqrt")
    assert "test_checks.py" in backward.line
    data = rg.find_nan(nn.Linear(6, 2), torch.full((4, 6), torch.nan))
    assert data is not None
    assert data.born == "input"
    assert rg.find_nan(nn.Linear(6, 2), x) is None


def test_a_loss_may_take_the_batch() -> None:
    x, y = torch.randn(4, 6), torch.full((4,), -100)
    found = rg.find_nan(nn.Linear(6, 2), (x, y), lambda output, batch: F.cross_entropy(output, batch[1]))
    assert found is not None
    assert found.operation == "cross_entropy"
    assert rg.find_nan(nn.Linear(6, 2), (x, y), lambda output: output.square().mean()) is None
    with pytest.raises(ProbeError, match="no number"):
        rg.find_nan(nn.Linear(6, 2), x, lambda output: output)
