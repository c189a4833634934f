"""Calls of a program that tell how it trains: it clears gradients, clips them, goes on with a schedule, scales losses.

A program may have imported torch's functions before anybody listens. So what is wrapped are methods, which are looked
up in their class, and what public functions call in turn, which they look up in their module. Updates, forwards and
backward passes have hooks of their own. Not seen is a method that a class of the user's own overrides without calling
torch's.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler
from torch.optim.optimizer import Optimizer

from retrograd.hooks.engine import is_compiling, is_tracing, uncompiled, uncompiled_itself
from retrograd.hooks.listeners import Listeners, Patch, Undo, replace, wrap_method

_clip_grad: Any = sys.modules["torch.nn.utils.clip_grad"]  # whose name the package gives to a function


class CallListener(Protocol):
    """Told of each such call, in the thread that makes it. Must not raise."""

    def called(self, name: str, about: object, frame: FrameType, **details: Any) -> None:
        """A call, with what it was given, and as ``value`` what it found (a tensor, on any device).

        ``about`` is the optimizer, the module, the scheduler, or the parameters; ``frame`` a frame within the call.
        """


class _Depth(threading.local):
    depth = 0
    """Calls that this thread is in: one that torch makes within another one is not the program's."""


_here = _Depth()


@uncompiled
def _tell(name: str, about: object, depth: int = 2, **details: Any) -> None:
    if _here.depth == 0 and not is_tracing():
        frame = sys._getframe(depth)
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
        _tell("clip_grad_value_", caller["parameters"], clip_value=float(caller["clip_value"]))


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
    if not is_part:  # which is told of when the chain has gone on
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


def _install() -> list[Undo]:
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


call_listeners = Listeners[CallListener](Patch(_install))
