"""A function mode that shows its listeners every call of a torch function, and is out of the way where it must be.

Compiled code is left alone, for torch.compile guards its graphs against modes. Some modules compute by other kernels
where a mode is on; it is not on while they run. A mode belongs to a thread, and nobody else can take it off: the thread
does so before it next calls a module, or compiled code.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection
from types import FrameType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from retrograd.core.hooks.compiled import compiled_call_listeners
from retrograd.core.hooks.engine import grad_enabled, is_compiling, uncompiled, uncompiled_itself
from retrograd.core.hooks.module import ModuleHooks, hook_every_call
from retrograd.core.hooks.parts import parameters_of
from retrograd.core.hooks.torch_calls import TORCHS_WAY, SameFrames, TorchCall, find_caller
from retrograd.core.notices import warn_of_fault

_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules that compute by other kernels where a function mode is on."""


class FunctionListener:
    """Shown every call of a torch function, also of those that make no node; if it raises, it is shown no more.

    Its methods must be ``uncompiled``.
    """

    @uncompiled
    def before(self, call: TorchCall) -> Any:
        """A function is about to be called.

        Returns:
            What comes back with its result; None if that is not to be shown.
        """
        return ()

    def after(self, call: TorchCall, seen: Any) -> None:
        """A function has returned.

        Args:
            call: the call, with its result.
            seen: what :meth:`before` returned.
        """
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """This listener has raised: a fault of ours must not stop the program."""
        warn_of_fault("note what operations do", error, "It is not noted any more.")


class FunctionMode(TorchFunctionMode):
    """Is put on a thread's stack, and taken off, wherever it stands in it; other modes keep their order.

    Attributes:
        listeners: are shown what is called, in order, and in reverse when it has returned; none from ``leave`` on.
        height: of two modes the higher one sees results later, with what the lower one has put in their place.
    """

    def __init__(self, *listeners: FunctionListener, height: int = 0) -> None:
        super().__init__()
        self.height = height
        self.listeners = listeners
        self._frames = SameFrames()
        self._places: Counter[int] = Counter()
        """Thread → how often it is on its stack, with where torch has put it aside for a call of ``backward``."""
        self._begun: set[int] = set()
        """Threads that it was put on when they began."""

    @uncompiled_itself
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Written out: it runs for every call of a torch function."""
        kwargs = kwargs or {}
        frame = sys._getframe(1)
        is_python = frame.f_code is TORCHS_WAY
        if is_python:
            frame = find_caller(frame, function)
        shown, seen = TorchCall(function, args, kwargs, frame), []
        for listener in self.listeners:
            try:
                own = listener.before(shown)
            except Exception as error:
                self._drop(listener, error)
            else:
                if own is not None:
                    seen.append((listener, own))
        if not self.listeners:
            self._leave_here()
        frames = self._frames
        call = frames.made.get((id(frame.f_code), frame.f_lasti)) or frames.make(frame)
        shown.result = (
            frames.call_python(frame, call, function, args, kwargs) if is_python else call(function, args, kwargs)
        )
        while seen:
            listener, own = seen.pop()
            try:
                listener.after(shown, own)
            except Exception as error:
                self._drop(listener, error)
        return shown.result

    @uncompiled
    def _drop(self, listener: FunctionListener, error: Exception) -> None:
        self.listeners = tuple(each for each in self.listeners if each is not listener)
        vars(self).pop("__torch_function__", None)
        listener.fail(error)

    @uncompiled
    def fail(self, error: Exception) -> None:
        """Show nothing more: one of its listeners has raised."""
        listeners, self.listeners = self.listeners, ()
        if listeners:
            self._drop(listeners[0], error)

    def hasten(self, call: Callable[..., Any]) -> None:
        """Have this called in place of ``__torch_function__``, until ``leave``: compiled code that does the same."""
        vars(self)["__torch_function__"] = MethodType(call, self)  # torch asks whose method it is

    def put_on(self, place: int | None = None) -> Callable[[], None] | None:
        """Put it on this thread's stack, at this place or on top; returns what takes it off, None if it was on."""
        if _place_of(self) is not None:
            return None
        _insert(self, torch._C._len_torch_function_stack() if place is None else place)
        self._places[threading.get_ident()] += 1
        return self._take_off

    def take_off(self) -> Callable[[], None] | None:
        """Take it off this thread's stack, leaving other modes; returns what puts it back, None if it was not on."""
        place = _place_of(self)
        if place is None:
            return None
        self._take_off()
        return lambda: self._put_back(place)

    def leave(self, used: Collection[int] | None = None) -> None:
        """Show nothing more, and take it off all threads that it is on.

        Off others, and off this one while torch has put it aside for a call of ``backward``, at the next call of a
        module there. Until then calls pass through it.

        Args:
            used: threads that use torch; all where left out. Another that it was put on when it began may never do so,
                and nothing waits in torch's tables for it before it does.
        """
        self.listeners = ()
        vars(self).pop("__torch_function__", None)
        self._take_off()
        self._frames.clear()
        for thread, count in tuple(self._places.items()):
            if count and (used is None or thread in used or thread not in self._begun):
                self._begun.discard(thread)
                before_next_call(thread, self._leave_thread)

    @uncompiled
    def _leave_here(self) -> None:
        """Leave this thread at its next call of a module, for it uses torch."""
        thread = threading.get_ident()
        if thread in self._begun:
            self._begun.discard(thread)
            before_next_call(thread, self._leave_thread)

    def is_entered(self) -> bool:
        """Return whether it is on this thread's stack, or put aside for a call of ``backward``."""
        return self._places[threading.get_ident()] > 0

    def thread_begins(self) -> None:
        """A thread of the program's begins."""
        self.put_on()
        self._begun.add(threading.get_ident())

    def thread_ends(self) -> None:
        """A thread of the program's ends."""
        self._begun.discard(threading.get_ident())
        self._take_off()
        run_errands()

    def _leave_thread(self) -> None:
        if not self.listeners:  # else it was put on again since
            self._take_off()

    def _take_off(self) -> None:
        place = _place_of(self)
        if place is not None:
            above = _pop_down_to(place + 1)
            torch._C._pop_torch_function_stack()
            _push(above)
            self._places[threading.get_ident()] -= 1

    def _put_back(self, place: int) -> None:
        self.put_on(place)


def _place_of(mode: FunctionMode) -> int | None:
    for place in range(torch._C._len_torch_function_stack()):
        if torch._C._get_function_stack_at(place) is mode:
            return place
    return None


def _insert(mode: FunctionMode, place: int) -> None:
    above = _pop_down_to(place)
    torch._C._push_on_torch_function_stack(mode)
    _push(above)


def _pop_down_to(place: int) -> list[Any]:
    return [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack() - place)]


def _push(popped: list[Any]) -> None:
    for mode in reversed(popped):
        torch._C._push_on_torch_function_stack(mode)


def lowest_place(height: int = -1) -> int:
    """The place on this thread's stack at which a mode may stay while the program enters and leaves modes of its own.

    A program takes off whatever is on top when it leaves a mode, so ours is below. A device is at the very bottom, and
    torch insists on it.

    Args:
        height: above those of ours that lie at the bottom and are as high as this, or lower; −1 for below all.
    """
    size = torch._C._len_torch_function_stack()
    place = 1 if size and isinstance(torch._C._get_function_stack_at(0), DeviceContext) else 0
    while place < size and getattr(torch._C._get_function_stack_at(place), "height", height + 1) <= height:
        place += 1
    return place


def is_fused(module: nn.Module, args: tuple[Any, ...]) -> bool:
    """Return whether a module computes by other kernels where a function mode is on, when it is called with this."""
    if not isinstance(module, _FUSED) or module.training:
        return False
    tensors = [*parameters_of(module), *(arg for arg in args if isinstance(arg, torch.Tensor))]
    return not (grad_enabled() and any(tensor.requires_grad for tensor in tensors))


class ForwardListener(FunctionListener):
    """Listens to a forward in the thread that starts it: to functions, and to calls of modules."""

    def __init__(self) -> None:
        self._mode = FunctionMode()
        self._hooks: ModuleHooks | None = None
        self._fused: tuple[int, Callable[[], None]] | None = None
        self._aside: tuple[Callable[[], None] | None, ModuleHooks] | None = None
        self._thread = 0

    @property
    def is_started(self) -> bool:
        """True if it has been started and not stopped; its mode may be off the stack for a while when it has been."""
        return self._hooks is not None

    def start(self) -> None:
        """Begin to listen, as low on the stack as a mode may stay."""
        self._thread = threading.get_ident()
        self._mode.listeners = (self,)
        self._mode.put_on(lowest_place())
        self._hooks = ModuleHooks(self.module_begins, self.module_ends)
        compiled_call_listeners.add(self)

    def stop(self) -> None:
        """Listen no more. What was noted stays."""
        compiled_call_listeners.remove(self)
        if self._hooks is not None:
            self._hooks.remove()
        self._mode.leave()
        self._aside = self._fused = self._hooks = None

    def take_off(self) -> Callable[[], None] | None:
        """Take its mode off this thread's stack; returns what puts it back, None if it was not on."""
        return self._mode.take_off()

    @uncompiled
    def module_begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called."""
        if not is_compiling() and is_fused(module, args):
            put_on = self.take_off()
            if put_on is not None:
                self._fused = id(module), put_on

    @uncompiled
    def module_ends(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The call of a module has ended."""
        if self._fused is not None and self._fused[0] == id(module) and not is_compiling():
            (_, put_on), self._fused = self._fused, None
            put_on()

    @uncompiled
    def compiled_call_begins(self, function: object, frame: FrameType) -> None:
        """Compiled code begins; in a call of ``backward``, for which torch puts modes aside, to compute it again."""
        put_on = self.take_off()
        is_here = put_on is not None or self._thread == threading.get_ident()
        if is_here and self._hooks is not None:
            self._hooks.pause()
            self._aside = put_on, self._hooks

    @uncompiled
    def compiled_call_ends(self) -> None:
        """Compiled code has ended."""
        if self._aside is not None:
            (put_on, hooks), self._aside = self._aside, None
            hooks.resume()
            if put_on is not None:
                put_on()


Errand = Callable[[], None]


class _Errands:
    """Errands of all threads. Nothing is hooked while there are none."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Errand, ...]] = {}
        self._undo: list[Errand] = []
        self._lock = threading.RLock()

    def add(self, thread: int, errand: Errand) -> None:
        with self._lock:
            self._waiting[thread] = (*self._waiting.get(thread, ()), errand)
            if not self._undo:
                compiled_call_listeners.add(self)
                self._undo = [hook_every_call(self).remove, lambda: compiled_call_listeners.remove(self)]

    @uncompiled
    def run(self) -> None:
        """Run the errands of this thread."""
        with self._lock:
            errands = self._waiting.pop(threading.get_ident(), ())
        for errand in errands:
            errand()
        with self._lock:
            alive = set(sys._current_frames())  # the dict itself has this very frame in it: a cycle
            self._waiting = {thread: errands for thread, errands in self._waiting.items() if thread in alive}
            while self._undo and not self._waiting:
                self._undo.pop()()

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.run()

    def after_call(self, module: nn.Module, output: Any) -> None:
        pass

    def compiled_call_begins(self, function: object, frame: FrameType) -> None:
        self.run()

    def compiled_call_ends(self) -> None:
        pass


_errands = _Errands()


def before_next_call(thread: int, errand: Errand) -> None:
    """Have a thread do this, once."""
    _errands.add(thread, errand)


def run_errands() -> None:
    """Do what this thread was to do: it ends."""
    _errands.run()
