"""Which policy is in charge: that of the innermost module call, in whatever thread makes it.

Torch keeps the pairs of saved-tensor hooks for each thread by itself, and a new thread begins with none: a pair that is
set around a loop does nothing in the threads of ``nn.DataParallel``. So a pair is set where a module is called, and
taken off where that call ends.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from torch import nn

from retrograd.hooks.call_frames import hooked_call, running_frames
from retrograd.hooks.operation_tap import OperationTap
from retrograd.hooks.recomputation import Recomputation
from retrograd.hooks.saved import belongs_to_checkpoint, push_pair, remove_pair
from retrograd.saved.keeper import Keeper
from retrograd.saved.overwriting import Place
from retrograd.saved.recompute import Recompute

NOWHERE = Place()


@dataclass(slots=True)
class Call:
    """A module call that runs.

    Attributes:
        frame: identity of the frame in which torch makes it.
        place: its name.
        keeper: in charge of what it saves.
        is_set: it has set the pair of hooks itself, and takes it off.
        recomputation: it will be made again in the backward pass.
        tap: shows the policy what is carried out in it.
    """

    frame: int
    place: Place
    keeper: Keeper
    is_set: bool = False
    recomputation: Recomputation | None = None
    tap: OperationTap | None = None

    def end(self) -> None:
        """It is over."""
        if self.recomputation is not None:
            self.recomputation.end()
        self.take_off()

    def take_off(self) -> None:
        """Take off what was set."""
        if self.tap is not None:
            self.tap.take_off()
            self.tap = None
        if self.is_set:
            remove_pair(self.keeper.pack)
            self.is_set = False


class Calls(threading.local):
    """The calls that run in this thread, the innermost last.

    Args:
        outside: what is not in any of them.

    Attributes:
        running: the calls.
        is_covered: a pair of hooks is set in this thread anyway, whatever is called.
    """

    def __init__(self, outside: Place = NOWHERE) -> None:
        self.outside = outside
        self.is_covered = False
        self.running: list[Call] = []

    def place(self) -> Place:
        """Where this thread is."""
        return self.running[-1].place if self.running else self.outside

    def begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place, keeper: Keeper
    ) -> None:
        """A module is called."""
        frame = hooked_call()
        self.settle(frame)
        call = Call(frame, place, keeper)
        is_inside = bool(self.running) and self.running[-1].keeper is keeper
        if keeper.is_open and not is_inside and not self.is_covered and not belongs_to_checkpoint():
            if isinstance(keeper.policy, Recompute):
                call.recomputation = Recomputation(module, args, kwargs)
            else:
                call.is_set = push_pair(keeper.pack, keeper.unpack)
                call.tap = keeper.watch_operations() if call.is_set else None
        self.running.append(call)

    def end(self) -> None:
        """The call whose hook is running has ended, and so have those within it."""
        frame = hooked_call()
        if self._is_known(frame):
            while self.running:
                call = self.running.pop()
                call.end()
                if call.frame == frame:
                    break

    def settle(self, beginning: int = 0) -> None:
        """Forget calls that were left without a word.

        Args:
            beginning: frame of a call that begins. If an older call has it, that one is over: frames that end are
                used again.
        """
        if not self.running:
            return
        if self._is_known(beginning) or self.running[-1].frame not in running_frames():
            alive = set(running_frames()) - {beginning}
            while self.running and (self.running[-1].frame not in alive or self._is_known(beginning)):
                self.running.pop().end()

    def leave(self) -> None:
        """Take off the pairs that are still set in this thread: it is in the middle of a call, or a call was left."""
        self.settle()
        for call in reversed(self.running):
            call.take_off()

    def _is_known(self, frame: int) -> bool:
        return any(call.frame == frame for call in self.running)


class ModuleWatch:
    """Tells of the calls of one module; of its replicas too, which share its hooks."""

    __slots__ = ("_calls", "_keeper", "_place")

    def __init__(self, place: Place, keeper: Keeper, calls: Calls) -> None:
        self._place = place
        self._keeper = keeper
        self._calls = calls

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is called."""
        if "_former_parameters" in module.__dict__:  # a replica of nn.DataParallel: its weights are other tensors
            self._keeper.residents.learn(module)
        self._calls.begin(module, args, kwargs, self._place, self._keeper)

    def after_call(self, module: nn.Module, output: Any) -> None:
        """The call ended."""
        self._calls.end()


class EveryModuleWatch:
    """Tells of the calls of all modules of the process, which are known by their type."""

    def __init__(self, keeper: Keeper, calls: Calls, outside: Place) -> None:
        self._keeper = keeper
        self._calls = calls
        self._outside = outside
        self._known: WeakSet[nn.Module] = WeakSet()

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called."""
        if module not in self._known:
            self._known.add(module)
            self._keeper.residents.learn(module)
        name = type(module).__name__
        self._calls.begin(module, args, kwargs, Place(name, name, log=self._outside.log), self._keeper)

    def after_call(self, module: nn.Module, output: Any) -> None:
        """The call ended."""
        self._calls.end()
