"""Where each optimizer update begins and ends, and what loss scaling does to it."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from retrograd.hooks.calls import count_steps
from retrograd.hooks.engine import uncompiled, uncompiled_itself


class OptimizerListener(Protocol):
    """Told of the updates of every ``torch.optim`` optimizer and of every use of a ``GradScaler``. Must not raise."""

    def update_begins(self, optimizer: Optimizer) -> None:
        """``optimizer.step`` was called; closures, if any, have not run yet."""

    def update_ends(self, optimizer: Optimizer, found_inf: torch.Tensor | None) -> None:
        """``optimizer.step`` has changed the parameters.

        Or has left them alone: where it does itself what loss scaling asks for, and ``found_inf`` is not zero.
        """

    def update_skipped(self, optimizer: Optimizer) -> None:
        """Loss scaling found a gradient that is not finite and left the parameters alone."""

    def loss_scaled(self, losses: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
        """``losses`` are what came of multiplying by ``scale`` (a copy, one element, on its own device)."""


class _Here(threading.local):
    told = 0
    """Updates, made or skipped, that were told of in this thread."""
    stepping: weakref.ref[Optimizer] | None = None
    """The optimizer whose step began last."""


_here = _Here()
_lock = threading.Lock()
_listeners: tuple[OptimizerListener, ...] = ()
_undo: list[Callable[[], None]] = []


def listen_to_optimizers(listener: OptimizerListener) -> None:
    """Tell this listener of every update in the process, the one that runs now in this thread among them."""
    global _listeners
    with _lock:
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
    stepping = _here.stepping() if _here.stepping is not None else None
    if stepping is not None and count_steps(stepping):
        listener.update_begins(stepping)


def unlisten_to_optimizers(listener: OptimizerListener) -> None:
    """Stop telling this listener; after the last one nothing of ours is left in torch."""
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other is not listener)
        while _undo and not _listeners:
            _undo.pop()()


class UpdateTap:
    """A pair of hooks around the updates of one optimizer; ``remove()`` takes both away.

    Args:
        optimizer: the optimizer.
        before: called before each update; told whether it was given a closure, which computes the gradients later.
        after: called after each update.
    """

    def __init__(self, optimizer: Optimizer, before: Callable[[bool], None], after: Callable[[], None]) -> None:
        self._handles = (
            optimizer.register_step_pre_hook(_Before(before)),
            optimizer.register_step_post_hook(_After(after)),
        )

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


class _Before:
    def __init__(self, tell: Callable[[bool], None]) -> None:
        self._tell = tell

    @uncompiled
    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if count_steps(optimizer) <= 1:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            self._tell(closure is not None)


class _After:
    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    @uncompiled
    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if count_steps(optimizer) <= 1:
            self._tell()


@uncompiled
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if count_steps(optimizer) > 1:
        return
    _here.stepping = weakref.ref(optimizer)
    for listener in _listeners:
        listener.update_begins(optimizer)


@uncompiled
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if count_steps(optimizer) > 1:
        return
    _here.told += 1
    found_inf = getattr(optimizer, "found_inf", None)  # set by GradScaler for fused optimizers while they step
    for listener in _listeners:
        listener.update_ends(optimizer, found_inf if isinstance(found_inf, torch.Tensor) else None)


@uncompiled_itself
def _scale(original: Callable[..., Any], scaler: GradScaler, outputs: Any) -> Any:
    result = original(scaler, outputs)
    if scaler.is_enabled() and scaler._scale is not None:
        _tell_scaled(result, scaler._scale.detach().clone())  # update() changes it in place
    return result


@uncompiled
def _tell_scaled(scaled: Any, scale: torch.Tensor) -> None:
    several = scaled if isinstance(scaled, (list, tuple)) else (scaled,)
    losses = [loss for loss in several if isinstance(loss, torch.Tensor)]
    for listener in _listeners:
        listener.loss_scaled(losses, scale)


@uncompiled_itself
def _scaler_step(
    original: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any
) -> Any:
    before = _here.told
    result = original(scaler, optimizer, *args, **kwargs)
    if _here.told == before:
        _tell_skipped(optimizer)
    return result


@uncompiled
def _tell_skipped(optimizer: Optimizer) -> None:
    _here.told += 1
    for listener in _listeners:
        listener.update_skipped(optimizer)


def _wrap_method(owner: type, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    original = getattr(owner, name)

    @functools.wraps(original)
    @uncompiled_itself
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(owner, name, method)

    def undo() -> None:
        if owner.__dict__.get(name) is method:
            setattr(owner, name, original)

    return undo
