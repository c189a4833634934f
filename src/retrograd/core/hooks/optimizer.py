"""Calls by which a program trains: optimizer updates, loss scaling, cleared and clipped gradients, learning rates.

A program may have imported torch's functions before anybody listens. So the wrapped functions are methods, which are
looked up in their class, and those that public functions call in turn, which they look up in their module. A method
that a class of the user's own overrides without calling torch's is not seen.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import lr_scheduler
from torch.optim import optimizer as optimizers
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler
from torch.optim.optimizer import Optimizer

from retrograd.core.hooks.calls import count_steps
from retrograd.core.hooks.engine import is_compiling, is_tracing, uncompiled, uncompiled_itself
from retrograd.core.hooks.listeners import Hook, HookEntry, Listeners, Patch, Undo, replace, wrap_method
from retrograd.core.hooks.live_objects import list_instances
from retrograd.core.identities import IdentityDict
from retrograd.core.spent import counted


class OptimizerListener(Protocol):
    """Notified of updates of every ``torch.optim`` optimizer and of each use of a ``GradScaler``. Must not raise."""

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


class _UpdateOfThread(threading.local):
    depth = 0
    """Calls that this thread is in: one that torch makes within another one is not the program's."""
    told = 0
    """Updates, made or skipped, that were reported in this thread."""
    stepping: weakref.ref[Optimizer] | None = None
    """The optimizer whose step began last."""


_here = _UpdateOfThread()


def list_optimizers() -> list[Optimizer]:
    """Every optimizer of the process that is complete, the oldest first."""
    return [optimizer for optimizer in list_instances(Optimizer) if "param_groups" in vars(optimizer)]


def held_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer, in their order; none of one that is still being made."""
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


class OptimizerNames:
    """Names the optimizers of a recording by their class, in the order in which they are met: ``SGD``, ``SGD_2``.

    No two share a name, also where a class is itself called ``SGD_2``; so a name does not say the class.
    """

    def __init__(self) -> None:
        self._numbers: IdentityDict[Optimizer, int] = IdentityDict()
        self._names: dict[str, list[str]] = {}
        self._taken: set[str] = set()

    def find(self, optimizer: Optimizer, most: int | None = None) -> str:
        """The name of an optimizer; with ``most``, all of a class from that one on share its name."""
        number = self.number(optimizer)
        return self._names[type(optimizer).__name__][min(number, most or number) - 1]

    def number(self, optimizer: Optimizer) -> int:
        """The number of an optimizer among those of its class, from 1."""
        number = self._numbers.get(optimizer)
        if number is None:
            kind = type(optimizer).__name__
            names = self._names.setdefault(kind, [])
            number = self._numbers[optimizer] = len(names) + 1
            several = (f"{kind}_{suffix}" for suffix in itertools.count(max(number, 2)))
            name = next(each for each in itertools.chain([kind][: not names], several) if each not in self._taken)
            names.append(name)
            self._taken.add(name)
        return number


class UpdateTap:
    """A pair of hooks around the updates of one optimizer; ``remove()`` takes both away.

    Args:
        optimizer: the optimizer.
        before: called when the gradients of an update are there: before it, or behind each call of its closure, which
            computes them. Told how many times that has been so in this update, from 1.
        after: called after each update.
    """

    def __init__(self, optimizer: Optimizer, before: Callable[[int], None], after: Callable[[], None]) -> None:
        self._entries = (
            HookEntry(_BeforeStep(before), optimizer._optimizer_step_pre_hooks),
            HookEntry(_AfterStep(after), optimizer._optimizer_step_post_hooks),
        )

    def remove(self) -> None:
        """Take the hooks away."""
        for entry in self._entries:
            entry.remove()


class _BeforeStep(Hook):
    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell

    @uncompiled
    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if count_steps(optimizer) > 1:
            return None
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": _Closure(kwargs["closure"], self._tell)}
        if len(args) > 1 and args[1] is not None and _takes_closure_first(optimizer):
            return (args[0], _Closure(args[1], self._tell), *args[2:]), kwargs
        self._tell(1)
        return None


def _takes_closure_first(optimizer: Optimizer) -> bool:
    """Return whether the first argument of ``step`` is a closure, as it is of all optimizers of torch."""
    return next(iter(inspect.signature(optimizer.step).parameters), "") == "closure"


class _Closure:
    """Stands for the closure of one update."""

    def __init__(self, closure: Callable[..., Any], tell: Callable[[int], None]) -> None:
        self._closure = closure
        self._tell = tell
        self._times = 0

    @uncompiled_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss = self._closure(*args, **kwargs)
        self._times += 1
        self._tell(self._times)
        return loss


class _AfterStep(Hook):
    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    @uncompiled
    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if count_steps(optimizer) <= 1:
            self._tell()


@uncompiled
@counted
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if count_steps(optimizer) > 1:
        return
    _here.stepping = weakref.ref(optimizer)
    if update_scouts:
        has_closure = kwargs.get("closure") is not None or any(callable(each) for each in args[1:2])
        for scout in update_scouts:
            scout.update_begins(optimizer, has_closure)
    for listener in reversed(optimizer_listeners.all):  # who came last is around the others
        listener.update_begins(optimizer)


@uncompiled
@counted
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if count_steps(optimizer) > 1:
        return
    _here.told += 1
    found_inf = getattr(optimizer, "found_inf", None)  # set by GradScaler for fused optimizers while they step
    for listener in optimizer_listeners:
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
    for listener in optimizer_listeners:
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
    for listener in optimizer_listeners:
        listener.update_skipped(optimizer)


def _watch_updates() -> list[Undo]:
    return [
        HookEntry(_before_step, optimizers._global_optimizer_pre_hooks).remove,
        HookEntry(_after_step, optimizers._global_optimizer_post_hooks).remove,
        wrap_method(GradScaler, "scale", _scale),
        wrap_method(GradScaler, "step", _scaler_step),
    ]


def _greet(listener: OptimizerListener) -> None:
    """Notify of the update that runs now in this thread."""
    stepping = _here.stepping() if _here.stepping is not None else None
    if stepping is not None and count_steps(stepping):
        listener.update_begins(stepping)


_updates = Patch(_watch_updates)
optimizer_listeners = Listeners[OptimizerListener](_updates, _greet)


class UpdateScout(Protocol):
    """Notified that an update begins before any listener is: finds out what it is of. Must not raise."""

    def update_begins(self, optimizer: Optimizer, has_closure: bool) -> None:
        """``optimizer.step`` was called, with a closure or without."""


update_scouts = Listeners[UpdateScout](_updates)


_clip_grad: Any = sys.modules["torch.nn.utils.clip_grad"]  # whose name the package gives to a function


class CallListener(Protocol):
    """Notified of each such call, in the thread that makes it. Must not raise."""

    def called(self, name: str, about: object, frame: FrameType, **details: Any) -> None:
        """A call, with what it was given, and as ``value`` what it found (a tensor, on any device).

        ``about`` is the optimizer, the module, the scheduler, the parameters, or for ``clip_grad_value_`` their
        gradients; ``frame`` a frame within the call.
        """


@uncompiled
def _tell(name: str, about: object, depth: int = 2, **details: Any) -> None:
    if _here.depth == 0 and not is_tracing():
        _hand_on(name, about, sys._getframe(depth), details)


@counted
def _hand_on(name: str, about: object, frame: FrameType, details: dict[str, Any]) -> None:
    for listener in call_listeners:
        listener.called(name, about, frame, **details)


@uncompiled_itself
def _zero_grad(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
    if is_compiling():
        return original(owner, *args, **kwargs)
    _tell("zero_grad", owner, set_to_none=bool(args[0] if args else kwargs.get("set_to_none", True)))
    return _run_inside(original, owner, *args, **kwargs)


def _around(name: str) -> Callable[..., Any]:
    @uncompiled_itself
    def call(original: Callable[..., Any], scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled():
            _tell(name, args[0] if args else kwargs.get("optimizer"))
        return original(scaler, *args, **kwargs)

    return call


@uncompiled_itself
def _update_scale(original: Callable[..., Any], scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
    result = original(scaler, *args, **kwargs)
    if scaler.is_enabled():
        _tell("scaler.update", None, value=scaler._scale)
    return result


@uncompiled_itself
def _run_inside(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _here.depth += 1
    try:
        return original(*args, **kwargs)
    finally:
        _here.depth -= 1


def _clip_norm(frame: FrameType, args: tuple[Any, ...], result: Any) -> None:
    if len(args) < 3:
        return
    parameters, max_norm, norm = args[:3]
    caller = frame.f_locals
    _tell(
        "clip_grad_norm_",
        parameters,
        value=norm,
        max_norm=float(max_norm),
        norm_type=float(caller.get("norm_type", 2.0)) if frame.f_code.co_name == "clip_grad_norm_" else 2.0,
    )


def _clip_value(frame: FrameType, args: tuple[Any, ...], result: Any) -> None:
    if frame.f_code.co_name == "clip_grad_value_":
        caller = frame.f_locals
        _tell("clip_grad_value_", caller["grads"], clip_value=float(caller["clip_value"]))


def _schedule(frame: FrameType, args: tuple[Any, ...], result: Any) -> None:
    if frame.f_code.co_name not in ("step", "_update_lr"):  # else somebody asks for a learning rate
        return
    first = last = frame.f_locals.get("self")
    is_part = False
    outer: FrameType | None = frame
    while outer is not None and outer.f_globals is frame.f_globals:
        if outer.f_code.co_name == "_initial_step":  # of a constructor
            return
        owner = outer.f_locals.get("self")
        if isinstance(owner, LRScheduler):
            is_part |= isinstance(owner, ChainedScheduler) and owner is not first
            last = owner
        outer = outer.f_back
    if not is_part:  # which is notified of when the chain has gone on
        _tell("scheduler.step", last, lr=result)


def _wrap_inner(room: Any, name: str, tell: Callable[[FrameType, tuple[Any, ...], Any], None]) -> Callable[[], None]:
    original = getattr(room, name, None)
    if original is None:  # of another torch
        return lambda: None

    @functools.wraps(original)
    @uncompiled_itself
    def inner(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not is_compiling():
            _tell_inner(tell, args, result)
        return result

    return replace(room, name, inner)


@uncompiled
def _tell_inner(tell: Callable[[FrameType, tuple[Any, ...], Any], None], args: tuple[Any, ...], result: Any) -> None:
    if call_listeners:
        tell(sys._getframe(2), args, result)


def _wrap_calls() -> list[Undo]:
    return [
        wrap_method(Optimizer, "zero_grad", _zero_grad),
        wrap_method(nn.Module, "zero_grad", _zero_grad),
        wrap_method(GradScaler, "unscale_", _around("scaler.unscale_")),
        wrap_method(GradScaler, "step", _around("scaler.step")),
        wrap_method(GradScaler, "update", _update_scale),
        _wrap_inner(_clip_grad, "_clip_grads_with_norm_", _clip_norm),
        _wrap_inner(_clip_grad, "_group_tensors_by_device_and_dtype", _clip_value),
        _wrap_inner(lr_scheduler, "_param_groups_val_list", _schedule),
    ]


call_listeners = Listeners[CallListener](Patch(_wrap_calls))
