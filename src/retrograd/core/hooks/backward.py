"""Where each backward pass begins and ends, and what it starts from.

``backward`` and ``grad`` in ``torch.autograd``, however a program got hold of them, call one function to run the
engine, which they look up in their module. A wrapper stands in its place while somebody listens, and is taken away
after the last one. The public functions themselves are left alone: torch.compile knows them by their identity.

Listeners hear of outermost passes: one inside another (reentrant checkpointing) is part of it. Followers are told
of every pass. Changers are listeners that change the gradients which a pass leaves, before the others read them.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from retrograd.core.hooks.engine import (
    OUTSIDE,
    current_graph_task,
    is_backward_compiled,
    is_tracing,
    is_transformed,
    uncompiled,
    uncompiled_itself,
)
from retrograd.core.hooks.listeners import Listeners, Patch, Undo, replace
from retrograd.core.spent import counted

_NAME = "_engine_run_backward"


class BackwardListener(Protocol):
    """Notified of each outermost backward pass, in the thread that asked for it. What it raises ends that pass."""

    def backward_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        """Called when a pass starts from these tensors."""

    def backward_ends(self, failed: bool) -> None:
        """Called when the pass has ended."""


@dataclass(slots=True, eq=False)  # frozen, it would take four times as long to make
class EngineRun:
    """The arguments of one run of the engine.

    Attributes:
        roots: tensors and gradient edges at which it begins.
        gradients: what comes in there.
        inputs: what it is to find gradients for; empty for all leaves.
        keeps_graph: whether what the nodes have saved is kept for another run.
        creates_graph: whether the gradients get a graph themselves.
        accumulates: whether gradients are added to ``.grad``, or returned.
        is_nested: whether it runs inside another pass.
        is_batched: whether it runs under ``vmap``, with gradients that have no values of their own.
    """

    roots: tuple[Any, ...]
    gradients: tuple[Any, ...]
    inputs: tuple[Any, ...]
    keeps_graph: bool
    creates_graph: bool
    accumulates: bool
    is_nested: bool
    is_batched: bool


class BackwardFollower(Protocol):
    """Notified of each backward pass, also those inside another, in the thread that asked for it. Must not raise.

    Not of passes that torch compiles as one graph: a hook on a node would become a part of it.
    """

    def run_begins(self, run: EngineRun) -> None:
        """The engine is about to run."""

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """Called when the engine has ended, with this error if it failed."""


@dataclass(slots=True, eq=False)
class _Outermost:
    """An outermost pass that runs: what it starts from, and who is notified of it."""

    roots: tuple[torch.Tensor, ...]
    listeners: tuple[BackwardListener, ...]
    changers: tuple[BackwardListener, ...]


class _RunningPasses(threading.local):
    inside: tuple[int, ...] = ()
    """For each reported pass in this thread, the number of the pass around it. Asked, for whoever wrapped our
    wrapper may still call it."""
    running: _Outermost | None = None
    """The outermost pass of this thread."""


_here = _RunningPasses()
_threads: set[int] = set()
"""Those in which a reported outermost pass runs."""
os.register_at_fork(after_in_child=_threads.clear)


def has_asked_for_a_pass() -> bool:
    """Return whether this thread waits for a reported outermost pass. A device's own thread never does."""
    return _here.running is not None


def runs_in_another_thread() -> bool:
    """Return whether a pass runs in a thread that is not this one.

    To read ``.grad`` of what it accumulates into is a race in torch, whose end is a null pointer; the hook of the
    accumulation itself is safe, for it runs under the node's lock.
    """
    return bool(_threads - {threading.get_ident()})


def _wrap_engine() -> list[Undo]:
    original = getattr(torch.autograd, _NAME)

    @functools.wraps(original)
    @uncompiled_itself
    def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
        outer = current_graph_task()
        around = _here.inside
        followers = () if is_backward_compiled() else backward_followers.all
        listeners, changers = (backward_listeners.all, backward_changers.all) if outer == OUTSIDE else ((), ())
        if not (followers or listeners or changers) or (around and around[-1] == outer) or is_tracing():
            return original(roots, *args, **kwargs)
        run = _describe(roots, args, kwargs, outer) if followers else None
        running = _describe_outermost(roots, listeners, changers) if outer == OUTSIDE else None
        failure: BaseException | None = None
        try:
            _here.inside = (*around, outer)
            if outer == OUTSIDE:
                _threads.add(threading.get_ident())
            _tell_begin(running, followers, run)
            return original(roots, *args, **kwargs)
        except BaseException as error:
            failure = error
            raise
        finally:
            _here.inside = around
            if outer == OUTSIDE:
                _threads.discard(threading.get_ident())
            _tell_end(running, followers, run, failure)
            failure = None  # an error that its own frame holds is a cycle

    return [replace(torch.autograd, _NAME, run)]


@uncompiled
def _describe(roots: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outer: int) -> EngineRun:
    gradients = tuple(args[0]) if args else ()
    return EngineRun(
        roots=tuple(roots),
        gradients=gradients,
        inputs=tuple(args[3]) if len(args) > 3 and args[3] is not None else (),
        keeps_graph=len(args) > 1 and bool(args[1]),
        creates_graph=len(args) > 2 and bool(args[2]),
        accumulates=bool(kwargs.get("accumulate_grad", False)),
        is_nested=outer != OUTSIDE,
        is_batched=any(isinstance(each, torch.Tensor) and is_transformed(each) for each in gradients),
    )


@uncompiled
def _describe_outermost(
    roots: Any, listeners: tuple[BackwardListener, ...], changers: tuple[BackwardListener, ...]
) -> _Outermost:
    return _Outermost(tuple(root for root in roots if isinstance(root, torch.Tensor)), listeners, changers)


@uncompiled
@counted
def _tell_begin(running: _Outermost | None, followers: tuple[BackwardFollower, ...], run: EngineRun | None) -> None:
    if running is not None:
        _here.running = running
        for listener in (*running.listeners, *running.changers):
            listener.backward_begins(running.roots)
    if run is not None:
        for follower in followers:
            follower.run_begins(run)


@uncompiled
@counted
def _tell_end(
    running: _Outermost | None,
    followers: tuple[BackwardFollower, ...],
    run: EngineRun | None,
    error: BaseException | None,
) -> None:
    if run is not None:
        for follower in followers:
            follower.run_ends(run, error)
    if running is not None:
        _here.running = None
        _end(running.changers, running.listeners, error is not None)


def _end(changers: tuple[BackwardListener, ...], listeners: tuple[BackwardListener, ...], failed: bool) -> None:
    """Notify of the end: the changer that came last first, and the listeners after all of them, even if one raises."""
    if not changers:
        for listener in listeners:
            listener.backward_ends(failed)
        return
    try:
        changers[-1].backward_ends(failed)
    except BaseException:
        failed = True
        raise
    finally:
        _end(changers[:-1], listeners, failed)


@contextmanager
def unheard() -> Iterator[None]:
    """Within it, those who listen by now hear of no pass; who comes meanwhile does, and must leave before its end."""
    kept = [(each, each.all) for each in (backward_listeners, backward_changers, backward_followers)]
    for listeners, _ in kept:
        listeners.all = ()
    try:
        yield
    finally:
        for listeners, before in kept:
            listeners.all = before


def join_pass(listener: BackwardListener) -> None:
    """Notify a listener of the outermost pass that runs now in this thread, unless it has been, or is about to be."""
    running = _here.running
    if running is not None and not any(other is listener for other in running.listeners):
        _greet(listener)


def _greet(listener: BackwardListener) -> None:
    """Notify of the outermost pass that runs now in this thread, if somebody was listening when it began."""
    running = _here.running
    if running is not None:
        running.listeners = (*running.listeners, listener)
        listener.backward_begins(running.roots)


def _greet_changer(changer: BackwardListener) -> None:
    running = _here.running
    if running is not None:
        running.changers = (*running.changers, changer)
        changer.backward_begins(running.roots)


_patch = Patch(_wrap_engine)
backward_listeners = Listeners[BackwardListener](_patch, _greet)
backward_changers = Listeners[BackwardListener](_patch, _greet_changer)
"""Called at the beginning after all listeners, and of the end before them; between, from outside to inside."""
backward_followers = Listeners[BackwardFollower](_patch)
