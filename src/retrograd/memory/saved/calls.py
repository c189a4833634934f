"""The module calls that run, and the policy in charge: that of the innermost call, in whatever thread makes it.

Torch keeps the pairs of saved-tensor hooks for each thread by itself, and a new thread begins with none: a pair that is
set around a loop does nothing in the threads of ``nn.DataParallel``. So a pair is set where a module is called, and
taken off where that call ends.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from torch import nn

from retrograd.core.hooks.calls import CallStack, hooked_call
from retrograd.core.hooks.checkpoints import Recomputation
from retrograd.core.hooks.saved import belongs_to_checkpoint, can_recompute, push_pair, remove_pair
from retrograd.core.identities import IdentitySet
from retrograd.memory.policies.overwriting import FILLED_LATE, SaveSite
from retrograd.memory.policies.recompute import Recompute, RecomputeGuard
from retrograd.memory.saved.keeper import Keeper

NOWHERE = SaveSite()


@dataclass(slots=True)
class PolicyCall:
    """A module call that runs.

    Attributes:
        frame: identity of the frame in which torch makes it.
        site: its name.
        keeper: in charge of what it saves.
        around: the call around it.
        is_set: it has set the pair of hooks itself, and takes it off.
        recomputation: runs it again in the backward pass.
    """

    frame: int
    site: SaveSite
    keeper: Keeper
    around: PolicyCall | None
    is_set: bool = False
    recomputation: Recomputation | None = None

    def leave(self) -> None:
        """End it: take off what was set, and end the recomputation."""
        if self.recomputation is not None:
            self.recomputation.end()
        if self.is_set:
            self.take_off()

    def set_up(self) -> None:
        """Set the pair of hooks; noted beforehand, since an interrupt may come between any two steps."""
        self.is_set = True
        self.is_set = push_pair(self.keeper.pack, self.keeper.unpack)

    def take_off(self) -> None:
        """Take off what was set."""
        if self.is_set:
            remove_pair(self.keeper.pack)
            self.is_set = False


class PolicyCalls(CallStack[PolicyCall], threading.local):
    """The calls that run in this thread, each with its policy.

    Args:
        outside: what is not in any of them.

    Attributes:
        covering: its pair of hooks is set in this thread anyway, whatever is called.
    """

    def __init__(self, outside: SaveSite = NOWHERE) -> None:
        super().__init__()
        self.outside = outside
        self.covering: Keeper | None = None

    def site(self) -> SaveSite:
        """Return the site in the model where this thread is."""
        return self.outside if self.top is None else self.top.site

    def cover(self, keeper: Keeper) -> bool:
        """Set a pair of hooks for the whole thread; return False where the program has forbidden all hooks."""
        if not push_pair(keeper.pack, keeper.unpack):
            return False
        self.covering = keeper
        return True

    def uncover(self) -> None:
        """Take the pair of the whole thread off."""
        keeper, self.covering = self.covering, None
        if keeper is not None:
            remove_pair(keeper.pack)

    def begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], site: SaveSite, keeper: Keeper
    ) -> None:
        """Record that a module is called, and put its policy in charge."""
        frame = hooked_call()
        if self.top is not None:
            self.settle(frame)
        around = self.top
        call = PolicyCall(id(frame), site, keeper, around)
        is_inside = around is not None and around.keeper is keeper
        is_in_charge = keeper.is_open and not is_inside and self.covering is None and not belongs_to_checkpoint()
        policy = keeper.policy
        if is_in_charge and isinstance(policy, Recompute) and can_recompute(module):
            guard = RecomputeGuard(site, self.site, keeper.parameters.include, policy.late)
            is_whole = any(type(part).__name__ in FILLED_LATE for part in module.modules())
            call.recomputation = Recomputation(module, args, kwargs, guard, is_whole=is_whole)
        self.top = call
        if is_in_charge and not isinstance(policy, Recompute):
            call.set_up()

    def end(self) -> None:
        """End the call whose hook is running, and those within it."""
        self.pop(id(hooked_call()))

    def leave(self) -> None:
        """Take off the pairs that are still set in this thread: it is in the middle of a call, or a call was left."""
        self.settle()
        call = self.top
        while call is not None:
            call.take_off()
            call = call.around


class ModuleWatch:
    """Notify of the calls of one module, and of its replicas, which share its hooks."""

    __slots__ = ("_calls", "_keeper", "_site")

    def __init__(self, site: SaveSite, keeper: Keeper, calls: PolicyCalls) -> None:
        self._site = site
        self._keeper = keeper
        self._calls = calls

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record that the module is called."""
        if "_former_parameters" in module.__dict__:  # a replica of nn.DataParallel: its weights are other tensors
            self._keeper.parameters.learn(module)
        self._calls.begin(module, args, kwargs, self._site, self._keeper)

    def after_call(self, module: nn.Module, output: Any) -> None:
        """Record that the call has ended."""
        self._calls.end()


class EveryModuleWatch:
    """Notify of the calls of all modules of the process, which are known by their type."""

    def __init__(self, keeper: Keeper, calls: PolicyCalls, outside: SaveSite) -> None:
        self._keeper = keeper
        self._calls = calls
        self._outside = outside
        self._known: IdentitySet[nn.Module] = IdentitySet()

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record that a module is called."""
        if module not in self._known:
            self._known.add(module)
            self._keeper.parameters.learn(module)
        name = type(module).__name__
        self._calls.begin(module, args, kwargs, SaveSite(name, name, log=self._outside.log), self._keeper)

    def after_call(self, module: nn.Module, output: Any) -> None:
        """Record that the call has ended."""
        self._calls.end()
