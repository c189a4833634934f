"""What a watched program's models and Functions are asked, and that it trains as without that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrograd.core.history.facts import read_facts
from retrograd.core.history.history import History
from retrograd.core.history.probe_facts import FunctionCheck, Probe
from retrograd.core.recording.recorder import Recorder
from retrograd.explaining.facts.probe_watch import ProbeWatch, is_next
from retrograd.explaining.probes.effects import leaves_something
from tests.explaining.facts.looking import line_of


def watch(model: nn.Module, step: Callable[[nn.Module], Tensor], sources: Sequence[Any] = (ProbeWatch,)) -> list[Any]:
    """Train for five steps; returns the facts."""
    history = History()
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, history, sources=sources)
    recorder.attach()
    try:
        for _ in range(5):
            optimizer.zero_grad()
            step(model).backward()
            optimizer.step()
    finally:
        recorder.close()
    assert not [event for event in history.events if event.kind == "fault"]
    return read_facts(history.events)


def answer(model: nn.Module, step: Callable[[nn.Module], Tensor], question: str = "samples") -> Probe:
    [found] = [each for each in watch(model, step) if isinstance(each, Probe) and each.question == question]
    return found


def noise(*shape: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(torch.randn(shape)).square().mean()


class Last(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 4, **options), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]  # called


class Decoder(nn.Module):
    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal, self.embed, self.head = is_causal, nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(F.scaled_dot_product_attention(x, x, x, is_causal=self.is_causal))  # type: ignore[no-any-return]


def next_token(model: nn.Module) -> Tensor:
    tokens = torch.randint(0, 11, (4, 9))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def test_samples_are_asked_at_the_third_step() -> None:
    found = answer(Last(), noise(5, 7, 6))
    assert (found.value, found.operation, found.module, found.step) == (1, "lstm", "lstm", 2)
    assert found.line == line_of("# called", Last)
    assert not found.fits_other
    assert answer(Last(batch_first=True), noise(5, 7, 6)).value == 0


def test_samples_along_another_dimension_fit_better() -> None:
    """Time first, on purpose: what is returned has a place for each sample."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]  # type: ignore[no-any-return]

    found = answer(Tagger(), noise(7, 5, 6))
    assert found.value == 1
    assert found.fits_other


@pytest.mark.parametrize("is_causal", [True, False])
def test_positions_are_asked_where_the_targets_are_the_next_tokens(is_causal: bool) -> None:
    found = answer(Decoder(is_causal=is_causal), next_token, "positions")
    assert found.next_token
    assert found.has_mask == is_causal
    assert found.value == (not is_causal)


def test_positions_are_not_asked_where_nothing_says_that_they_are_hidden() -> None:
    found = answer(nn.Linear(6, 6), noise(5, 6), "positions")
    assert found.value != found.value
    assert "Neither" in found.why_not


def test_targets_one_on_are_known() -> None:
    tokens = torch.randint(0, 11, (4, 9))
    ahead = tokens.roll(-1, 1)
    assert is_next(ahead, tokens)
    assert is_next(ahead.flatten(), tokens)
    assert is_next(tokens[:, 1:], tokens)
    assert is_next(torch.where(torch.rand(4, 9) < 0.3, -100, ahead), tokens)
    assert not is_next(tokens, tokens)
    assert not is_next(tokens.roll(-2, 1), tokens)
    assert not is_next(torch.full_like(tokens, -100), tokens)
    assert not is_next(torch.zeros_like(tokens), torch.zeros_like(tokens))


# ---- Functions ----


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None  # returns


class TimesRight(Times):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.factor, None


class Rounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x.mul(factor).round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class Reverses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return -0.1 * gradient, None


class Clamps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x.clamp(-0.3, 0.3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class Forgets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.saved_tensors[0].exp(), None


class Drops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x * (torch.rand_like(x) < 0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


_calls: list[int] = []


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        _calls.append(1)
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class Applies(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(6, 6), kind

    def forward(self, x: Tensor) -> Tensor:
        return self.kind.apply(self.fc(x), 3.0)  # type: ignore[no-any-return]  # applied


VERDICTS = [
    (Times, "factor"), (TimesRight, "right"), (Rounds, "straight-through"), (Reverses, "identity"), (Clamps, "other"),
    (Forgets, "constant"), (Drops, "not checked"), (Counts, "not checked"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "verdict"), VERDICTS, ids=lambda each: getattr(each, "__name__", each))
def test_a_backward_is_held_against_the_forward(kind: Any, verdict: str) -> None:
    _calls.clear()
    [found] = [each for each in watch(Applies(kind), noise(5, 6)) if isinstance(each, FunctionCheck)]
    assert (found.name, found.verdict, found.step) == (kind.__name__, verdict, 2)
    assert found.called == line_of("# applied", Applies)
    assert len(_calls) == (5 if kind is Counts else 0)
    if kind is Times:
        assert found.value == pytest.approx(1 / 3)
        assert (found.argument, found.is_linear) == ("x", True)
        assert found.line == line_of("# returns", Times)


_state: dict[str, int] = {"n": 0}


def writes_a_global() -> None:
    _state["n"] += 1


def calls_it() -> None:
    writes_a_global()


def writes_its_own(ctx: Any, x: Tensor) -> Tensor:
    ctx.n = _state["n"]
    ctx.seen.append(1)
    y = torch.zeros_like(x)
    y[0] = 1
    return torch.add(x, y)


def test_code_that_writes_to_what_outlives_it_is_known() -> None:
    assert leaves_something(writes_a_global)
    assert leaves_something(calls_it)
    assert not leaves_something(writes_its_own)


class Global(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        writes_a_global()
        return self.fc(x)  # type: ignore[no-any-return]


def test_a_model_that_counts_its_calls_elsewhere_is_not_asked() -> None:
    _state["n"] = 0
    assert "outlives" in answer(Global(), noise(5, 6)).why_not
    assert _state["n"] == 5


# ---- training ----


@pytest.mark.parametrize("make", [lambda: Decoder(is_causal=True), lambda: Decoder(is_causal=False)])
def test_training_is_the_same_to_the_bit(make: Callable[[], nn.Module]) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.drop = make(), nn.BatchNorm1d(8), nn.Dropout(0.3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.drop(self.norm(self.inner(tokens)))  # type: ignore[no-any-return]

    def train(sources: Sequence[Any]) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(1)
        model = Noisy()
        watch(model, next_token, sources)
        return model.state_dict(), torch.get_rng_state()

    plain, state = train(())
    watched, same = train((ProbeWatch,))
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    assert torch.equal(state, same)
