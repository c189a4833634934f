"""Listeners hear of every update and every use of loss scaling, once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from retrograd.core.hooks.optimizer import optimizer_listeners


class Listener:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def update_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self.heard.append("begins")

    def update_ends(self, optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> None:
        self.heard.append("ends" if found_inf is None else f"ends, found_inf {found_inf.item():g}")

    def update_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        self.heard.append("skipped")

    def loss_scaled(self, losses: Sequence[Tensor], scale: Tensor) -> None:
        self.heard.append((len(losses), scale.item()))


@contextmanager
def listening() -> Iterator[Listener]:
    listener = Listener()
    optimizer_listeners.add(listener)
    try:
        yield listener
    finally:
        optimizer_listeners.remove(listener)


def make(kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 1)
    return model, kind(model.parameters(), **(options or {"lr": 0.1}))


def backward(model: nn.Module, scaler: GradScaler | None = None, factor: float = 1.0) -> Tensor:
    loss = model(torch.ones(1, 2)).sum() * factor
    (loss if scaler is None else scaler.scale(loss)).backward()
    return loss


INF = float("inf")
UPDATES: dict[str, tuple[dict[str, Any], GradScaler | None, float, list[Any]]] = {
    "SGD": ({}, None, 1.0, ["begins", "ends"]),
    "AdamW": ({"kind": torch.optim.AdamW}, None, 1.0, ["begins", "ends"]),
    "Adagrad": ({"kind": torch.optim.Adagrad}, None, 1.0, ["begins", "ends"]),
    "a skipped one": ({}, GradScaler("cpu", init_scale=8.0), INF, [(1, 8.0), "skipped"]),
    "a fused one, which skips by itself": (
        {"fused": True, "lr": 0.1}, GradScaler("cpu", init_scale=8.0), INF,
        [(1, 8.0), "begins", "ends, found_inf 1"],
    ),
    "a scaler that is switched off": ({}, GradScaler("cpu", enabled=False), 1.0, ["begins", "ends"]),
}  # fmt: skip


@pytest.mark.parametrize("name", UPDATES)
def test_an_update(name: str) -> None:
    options, scaler, factor, heard = UPDATES[name]
    model, update = make(**options)
    with listening() as listener:
        backward(model, scaler, factor=factor)
        update.step() if scaler is None else scaler.step(update)
    assert listener.heard == heard


def test_an_optimizer_that_runs_a_closure() -> None:
    model, update = make(torch.optim.LBFGS, max_iter=2)

    def closure() -> Tensor:
        update.zero_grad()
        return backward(model)

    with listening() as listener:
        update.step(closure)
    assert listener.heard == ["begins", "ends"]


def test_an_update_that_fails() -> None:
    model, update = make()

    def closure() -> Tensor:
        raise ValueError("asked for")

    with listening() as listener:
        with pytest.raises(ValueError, match="asked for"):
            update.step(closure)
        backward(model)
        update.step()
    assert listener.heard == ["begins", "begins", "ends"]


def test_hooks_of_the_user_stay_in_order() -> None:
    heard: list[str] = []

    class Writing(Listener):
        def update_begins(self, optimizer: torch.optim.Optimizer) -> None:
            heard.append("ours")

        def update_ends(self, optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> None:
            heard.append("ours")

    model, update = make()
    backward(model)
    update.register_step_pre_hook(lambda *_: heard.append("pre"))
    update.register_step_post_hook(lambda *_: heard.append("post"))
    writing = Writing()
    optimizer_listeners.add(writing)
    update.step()
    optimizer_listeners.remove(writing)
    update.step()
    assert [each for each in heard if each != "ours"] == ["pre", "post", "pre", "post"]
    assert heard.count("ours") == 2


def test_loss_scaling_tells_the_scale_before_it_is_changed() -> None:
    model, update = make()
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    with listening() as listener:
        for _ in range(2):
            backward(model, scaler)
            scaler.step(update)
            scaler.update()
        scaler.scale([torch.ones(1), torch.ones(1)])
    assert listener.heard == [(1, 8.0), "begins", "ends", (1, 16.0), "begins", "ends", (2, 32.0)]


def test_a_wrapper_around_ours_is_left_alone_and_nothing_is_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradScaler, "step", GradScaler.step)  # put back at the end
    with listening():
        ours = GradScaler.step

        @functools.wraps(ours)
        def theirs(*args: Any, **kwargs: Any) -> Any:
            return ours(*args, **kwargs)

        GradScaler.step = theirs  # type: ignore[method-assign]
    assert GradScaler.step is theirs
    model, update = make()
    scaler = GradScaler("cpu")
    with listening() as listener:
        backward(model, scaler, factor=float("inf"))
        scaler.step(update)
    assert listener.heard == [(1, 65536.0), "skipped"]


def test_an_update_in_another_thread_is_not_taken_for_one_of_this() -> None:
    """While loss scaling skips an update here, another thread makes one."""
    model, update = make()
    scaler = GradScaler("cpu", init_scale=8.0)

    class Meanwhile(GradScaler):
        def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> Any:
            other, other_update = make()
            backward(other)
            thread = threading.Thread(target=other_update.step)
            thread.start()
            thread.join()
            return super()._maybe_opt_step(*args, **kwargs)

    scaler = Meanwhile("cpu", init_scale=8.0)
    with listening() as listener:
        backward(model, scaler, factor=float("inf"))
        scaler.step(update)
    assert listener.heard == [(1, 8.0), "begins", "ends", "skipped"]
