"""Put policies in charge of what a model saves for its backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple, Self

from torch import nn

from retrograd.core.errors import SavedPolicyError
from retrograd.core.hooks.function_mode import FunctionMode
from retrograd.core.hooks.listeners import hidden_hooks
from retrograd.core.hooks.module import CallTap, hook_every_call
from retrograd.core.hooks.names import NamedModule, walk_modules
from retrograd.core.hooks.parts import is_compiled
from retrograd.core.hooks.storages import ParameterStorages
from retrograd.core.hooks.writes import WriteNotes
from retrograd.core.sites.pattern import Candidate, Pattern, asks_for_call, compile_pattern, describe_pattern
from retrograd.core.sites.selection import Selection
from retrograd.core.sites.site import ROOT, Site
from retrograd.memory.budget.plan import Plan
from retrograd.memory.budget.planned import Budget, Planned
from retrograd.memory.policies.overwriting import SaveSite
from retrograd.memory.policies.policy import Policy, check_policy
from retrograd.memory.policies.recompute import Recompute
from retrograd.memory.saved.calls import EveryModuleWatch, ModuleWatch, PolicyCalls
from retrograd.memory.saved.keeper import Account, Keeper

Policies = Policy | Mapping[Pattern, Policy]

Remove = Callable[[], None]
"""Takes hooks away."""


class SavedHandle:
    """Policies in charge; a context manager. ``remove()`` ends it, and what is packed still comes back.

    Attributes:
        accounts: what each policy was given in all passes so far, and what it held of that in memory.
    """

    def __init__(self, keepers: list[Keeper], taps: list[Remove], calls: PolicyCalls, log: WriteNotes | None) -> None:
        self.accounts: dict[Policy, Account] = {keeper.policy: keeper.account for keeper in keepers}
        self._is_removed = False
        self._ending = ExitStack()
        hidden_hooks.hold()
        self._ending.callback(hidden_hooks.release)
        for keeper in keepers:
            self._ending.callback(keeper.close)
        for tap in taps:
            self._ending.callback(tap)
        self._ending.callback(calls.leave)
        if log is not None:
            mode = FunctionMode(log)
            mode.put_on()
            self._ending.callback(mode.leave)

    @property
    def plan(self) -> Plan | None:
        """The plan that was used last under a budget; None before a pass has ended.

        Raises:
            BudgetError: the pass that has just ended cannot be kept within the budget.
        """
        plans = [policy.plan for policy in self.accounts if isinstance(policy, Planned)]
        return plans[0] if plans else None

    def remove(self) -> None:
        """Take the hooks away and end what the policies run. May be called twice."""
        self._is_removed = True
        self._ending.close()

    def __repr__(self) -> str:
        state = "ended" if self._is_removed else "in charge"
        return f"<SavedHandle, {state}: {', '.join(map(repr, self.accounts))}>"

    def __enter__(self) -> Self:
        if self._is_removed:
            raise SavedPolicyError(
                "This rg.keep_saved() was closed.",
                repair="call rg.keep_saved() again for each block; the policy itself may be the same.",
                reason="entered again they would keep nothing.",
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def keep_saved(
    model: nn.Module | None,
    policy: Policies | None = None,
    *,
    budget: Budget | None = None,
    watch_writes: bool = False,
) -> SavedHandle:
    """Keep what autograd saves between forward and backward where it costs least.

    ::

        with rg.keep_saved(model, rg.saved.Disk()):
            loss = model(batch).square().mean()
            loss.backward()

    Args:
        model: what its modules save while they run is kept by the policy, in whatever thread they run. None means the
            whole process: everything that this thread saves, and what modules save in other threads.
        policy: one for all modules, or a dict from patterns of module paths to policies. The first pattern that
            matches a module, or one that it lies in, holds for it; modules that none matches are left alone.
        budget: instead of a policy: bytes that may be held at any position, as an int or as ``"8GB"``, or a share of
            what would be held, such as ``0.5``. Short for :class:`~retrograd.memory.budget.planned.Planned`.
        watch_writes: note every write in place, 3 µs an operation, so that
            :class:`~retrograd.core.errors.OverwrittenError` names the line
            that wrote. Only for this thread, and not for compiled models.

    Returns:
        A context manager; ``remove()`` ends it as well.

    Raises:
        SavedPolicyError: ``model`` is not a model, or ``policy`` not a policy; both it and a budget are given, or
            neither; ``Recompute`` without a model; a pattern that never holds; or ``budget`` is not a size.
        NoSuchSiteError: a pattern matches no module.
        PatternError: a pattern of the wrong kind.
    """
    if (policy is None) == (budget is None):
        raise SavedPolicyError(
            "Neither a policy nor a budget is given." if policy is None else "Both a policy and a budget are given.",
            repair='give one of them: rg.keep_saved(model, rg.saved.Disk()), or rg.keep_saved(model, budget="8GB").',
        )
    if not (model is None or isinstance(model, nn.Module)):
        raise SavedPolicyError(
            f"A {type(model).__name__} is not a model.",
            repair="give the model first, then the policy: rg.keep_saved(model, rg.saved.Disk()).",
        )
    if budget is not None:
        policy = Planned(budget)
    assert policy is not None
    log = WriteNotes() if watch_writes else None
    calls = PolicyCalls(SaveSite(log=log))
    parameters = ParameterStorages()
    if model is None:
        keepers, taps = _tap_process(policy, calls, parameters)
    else:
        keepers, taps = _tap_model(model, policy, calls, parameters)
    handle = SavedHandle(keepers, taps, calls, log)
    try:
        for keeper in keepers:
            keeper.open()
    except BaseException:
        handle.remove()
        raise
    return handle


def _tap_process(
    policy: Policies, calls: PolicyCalls, parameters: ParameterStorages
) -> tuple[list[Keeper], list[Remove]]:
    if isinstance(policy, (Mapping, Recompute)):
        raise SavedPolicyError(
            f"{policy!r} needs a model.",
            repair="pass the model: rg.keep_saved(model, …).",
            reason="paths of modules, and forwards to run again, are those of one model.",
        )
    keeper = Keeper(check_policy(policy), parameters, calls.site)
    hooks = hook_every_call(EveryModuleWatch(keeper, calls, calls.outside))
    return [keeper], [_cover_thread(keeper, calls), hooks.remove]


def _cover_thread(keeper: Keeper, calls: PolicyCalls) -> Remove:
    """Set the pair of hooks of a whole thread. It is taken away there; in another thread it goes at the next saving."""
    thread = threading.get_ident()
    is_set = calls.cover(keeper)

    def uncover() -> None:
        if is_set and threading.get_ident() == thread:
            calls.uncover()

    return uncover


def _tap_model(
    model: nn.Module, policy: Policies, calls: PolicyCalls, parameters: ParameterStorages
) -> tuple[list[Keeper], list[Remove]]:
    for module in model.modules():
        parameters.learn(module)
    keepers: dict[int, Keeper] = {}
    taps: list[Remove] = []
    for entry, chosen in _assign_policies(walk_modules("", model), policy):
        keeper = keepers.get(id(chosen))
        if keeper is None:
            keeper = keepers[id(chosen)] = Keeper(chosen, parameters, calls.site)
        watch = ModuleWatch(SaveSite(entry.path, type(entry.module).__name__, log=calls.outside.log), keeper, calls)
        taps.append(CallTap(entry.tapped, watch, outermost=True).remove)
    return list(keepers.values()), taps


class _PolicyPattern(NamedTuple):
    """A pattern of modules, and their policy."""

    pattern: Pattern
    matches: Callable[[Candidate], bool]
    policy: Policy


def _assign_policies(entries: list[NamedModule], policy: Policies) -> list[tuple[NamedModule, Policy]]:
    """Modules that are called, each with its policy; those that run as a part of compiled code are left out."""
    patterns = _read_patterns(policy)
    candidates = {entry.path: Candidate(Site(entry.path, ("output",)), entry.module) for entry in entries}
    Selection([each.pattern for each in patterns]).check(list(candidates.values()))
    assigned = []
    for entry in entries:
        around = [candidates[path] for path in _paths_around(entry.path) if path in candidates]
        first = next((each for each in patterns if any(map(each.matches, around))), None)
        if first is not None:
            assigned.append((entry, first))
    _refuse_unused(patterns, [first.pattern for _, first in assigned])
    compiled = {entry.path for entry in entries if is_compiled(entry.tapped)}
    return [
        (entry, first.policy)
        for entry, first in assigned
        if entry.is_called and compiled.isdisjoint(_paths_around(entry.path)[1:])
    ]


def _read_patterns(policy: Policies) -> list[_PolicyPattern]:
    """Check patterns and policies, in their order; a policy alone is for all modules."""
    given = policy if isinstance(policy, Mapping) else {"*": policy}
    patterns = [_PolicyPattern(each, compile_pattern(each), check_policy(one)) for each, one in given.items()]
    if not patterns:
        raise SavedPolicyError("The dict of policies is empty.", repair="give at least one pattern and its policy.")
    by_call = next(filter(asks_for_call, given), None)
    if by_call is not None:
        raise SavedPolicyError(
            f"{describe_pattern(by_call)} asks for single calls of modules.",
            repair="name the modules: 'blocks.*'.",
            reason="a policy is for all that a module saves, in every call.",
        )
    return patterns


def _refuse_unused(patterns: list[_PolicyPattern], used: list[Pattern]) -> None:
    for each in patterns:
        if each.pattern not in used:
            raise SavedPolicyError(
                f"The pattern {describe_pattern(each.pattern)} never holds: patterns before it match all its modules.",
                repair="put it before them.",
                reason="the first pattern that matches a module, or one that it lies in, decides.",
            )


def _paths_around(path: str) -> list[str]:
    """A module's path, and those of the modules that it lies in, from the inside."""
    if path == ROOT:
        return [ROOT]
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)] + [ROOT]
