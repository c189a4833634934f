"""Where each optimizer update begins and ends, and what loss scaling does to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class OptimizerListener(Protocol):
    """Told of the updates of every ``torch.optim`` optimizer and of every use of a ``GradScaler``."""

    def update_begins(self, optimizer: Optimizer) -> None:
        """``optimizer.step`` was called; closures, if any, have not run yet."""

    def update_ends(self, optimizer: Optimizer) -> None:
        """``optimizer.step`` has changed the parameters."""

    def update_skipped(self, optimizer: Optimizer) -> None:
        """Loss scaling found a gradient that is not finite and left the parameters alone."""

    def loss_scaled(self, scale: torch.Tensor) -> None:
        """A loss was multiplied by ``scale`` (a copy, 0-d, on its own device)."""


_listeners: tuple[OptimizerListener, ...] = ()
_undo: list[Callable[[], None]] = []
_updates_seen = 0


def listen_to_optimizers(listener: OptimizerListener) -> None:
    """Tell this listener of every update in the process."""
    global _listeners
    if not _listeners:
        _undo.extend(
            (
                register_optimizer_step_pre_hook(_before_step).remove,
                register_optimizer_step_post_hook(_after_step).remove,
                _wrap_method(GradScaler, "scale", _scale),
                _wrap_method(GradScaler, "step", _scaler_step),
            )
        )
    _listeners = (*_listeners, listener)


def unlisten_to_optimizers(listener: OptimizerListener) -> None:
    """Stop telling this listener; after the last one nothing of ours is left in torch."""
    global _listeners
    _listeners = tuple(other for other in _listeners if other is not listener)
    if not _listeners:
        while _undo:
            _undo.pop()()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for listener in _listeners:
        listener.update_begins(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _updates_seen
    _updates_seen += 1
    for listener in _listeners:
        listener.update_ends(optimizer)


def _scale(original: Callable[..., Any], scaler: GradScaler, outputs: Any) -> Any:
    result = original(scaler, outputs)
    if scaler.is_enabled() and scaler._scale is not None:
        scale = scaler._scale.detach().clone()  # update() changes it in place
        for listener in _listeners:
            listener.loss_scaled(scale)
    return result


def _scaler_step(original: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    before = _updates_seen
    result = original(scaler, optimizer, *args, **kwargs)
    if _updates_seen == before:
        for listener in _listeners:
            listener.update_skipped(optimizer)
    return result


def _wrap_method(owner: type, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(owner, name, method)

    def undo() -> None:
        if owner.__dict__.get(name) is method:
            setattr(owner, name, original)

    return undo
