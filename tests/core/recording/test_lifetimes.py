"""A recording, open or closed, keeps nothing alive that the program has dropped, and loses nothing of it."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

import retrograd as rg
from retrograd.core.recording.record import Recording
from retrograd.core.recording.recorder import Recorder
from retrograd.core.recording.settings import Settings
from tests.core.recording.collector import Collector


def total(tensor: Tensor) -> Tensor:
    return tensor.float().sum()


HOWS: dict[str, dict[str, Any]] = {
    "default": {},
    "everything": {"sites": "*", "statistics": [total]},
    "tensors": {"sites": "*", "tensors": "*:output*"},
    "ring": {"tensors": rg.Keep("*:output*", last=3, when=rg.on_nonfinite())},
}


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process loads the compiler, which leaves frames about
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def train(model: nn.Module, steps: int = 2) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 3)).square().mean()
        loss.backward()
        optimizer.step()
    return loss


def train_by_hand(model: nn.Module) -> None:
    for _ in range(2):
        model(torch.randn(5, 3)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    model(torch.randn(5, 3)).square().mean().backward()


def fail(model: Any) -> None:
    handle = model[3].register_forward_hook(raise_)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(5, 3))
    handle.remove()


def raise_(*_: object) -> None:
    raise ZeroDivisionError


USES: dict[str, Callable[[nn.Module], Any]] = {
    "trained": train,
    "by hand": train_by_hand,
    "never called": lambda model: None,
    "only forward": lambda model: model(torch.randn(5, 3)),
    "failed": fail,
}


def parts_of(model: nn.Module) -> list[Callable[[], object]]:
    """Finds what there is of a model, as long as it is there."""
    parts: list[Callable[[], object]] = [weakref.ref(module) for module in model.modules()]
    parts += [WeakIdRef(each) for each in (*model.parameters(), *model.buffers())]
    parts += [WeakIdRef(each.grad) for each in model.parameters() if each.grad is not None]
    return parts


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("is_open", [True, False])
def test_nothing_of_a_dropped_model_is_held(how: str, use: str, is_open: bool) -> None:
    model = make_net()
    recorded = rg.record(model, **HOWS[how])
    USES[use](model)
    if not is_open:
        recorded.close()
    parts = parts_of(model)
    del model
    assert [part() for part in parts if part() is not None] == []
    recorded.close()


def test_a_graph_that_the_program_holds_does_not_hold_the_model() -> None:
    model = make_net()
    with rg.record(model, sites="*"):
        loss = train(model)
        gone = weakref.ref(model)
        del model
        assert gone() is None
    assert loss.item() >= 0


# ---- what is recorded of it is all there ----------------------------------------------------------------------


class Shared(nn.Module):
    """With what omissions are told of: a frozen and a tied parameter, and modules that are not called or not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.idle = nn.Linear(3, 3)
        self.fixed = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed(self.second(self.first(x)))


def record_one(kind: Callable[[], nn.Module], *, is_dropped: bool, **choices: Any) -> Collector:
    torch.manual_seed(0)
    model: Any = kind()
    seen = Collector()
    with Recording(Recorder(model, seen, Settings(**choices)), seen, None):
        train(model)
        if is_dropped:
            gone = weakref.ref(model)
            del model
            assert gone() is None
    return seen


def rows(seen: Collector) -> list[tuple[Any, ...]]:
    return [(row.step, row.micro, row.phase, row.site, row.calls, row.sum) for row in seen.rows]


@pytest.mark.parametrize("kind", [make_net, Shared])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"sites": "*"},
        {"sites": [nn.Linear, "*:input*"]},
        {"sites": lambda each: type(each.module) is nn.Linear},
    ],
    ids=["default", "everything", "type", "predicate"],
)
def test_the_record_of_a_dropped_model_is_that_of_one_that_is_kept(kind: Any, choices: dict[str, Any]) -> None:
    dropped, kept = (record_one(kind, is_dropped=is_dropped, **choices) for is_dropped in (True, False))
    assert rows(dropped) == rows(kept)
    assert dropped.facts == kept.facts


# ---- models one after the other -------------------------------------------------------------------------------


NAMES = [f"model{number}" for number in range(12)]


def sweep(*, is_kept: bool) -> Collector:
    """Models of one shape, so that a later one lies where an earlier one lay."""
    seen, held = Collector(), []
    recorder: Recorder | None = None
    numbers: list[set[int]] = []
    for name in NAMES:
        torch.manual_seed(1)
        model = Shared()
        if recorder is None:
            recorder = Recorder({name: model}, seen, Settings(sites="*"))
            recording = Recording(recorder, seen, None)
        else:
            recorder.add_model(name, model)
        train(model)
        numbers.append({id(each) for each in (*model.modules(), *model.parameters())})
        if is_kept:
            held.append(model)
        del model
    recording.close()
    assert is_kept or any(one & other for one, other in itertools.combinations(numbers, 2))
    return seen


def test_a_later_model_is_not_taken_for_one_that_lay_there_before() -> None:
    dropped, kept = sweep(is_kept=False), sweep(is_kept=True)
    assert {row.site for row in dropped.rows} == {row.site for row in kept.rows}
    for name in NAMES:
        mine, other = ([row for row in rows(seen) if row[3].startswith(f"{name}.")] for seen in (dropped, kept))
        assert mine == other
    assert dropped.facts["not_recorded"] == kept.facts["not_recorded"]
    assert [row["path"] for row in dropped.facts["model"]] == [row["path"] for row in kept.facts["model"]]
