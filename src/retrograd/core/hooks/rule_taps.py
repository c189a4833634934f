"""The hooks on modules that rewrite: they change what a module is called with, and what it returns.

They come after the hooks that the user has set so far, and before all that read. While torch.compile traces them, they
put operations into its graph instead (``retrograd.compiled.rules``), and which those are follows from the
:class:`ReachedSites` of the rules alone. A graph is guarded by it. So a hook that is part of a graph stays on its
module when it is removed, and reaches nothing: the graph is left, and is found again once a hook is asked for that
reaches the same.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from retrograd.core.hooks import in_graphs
from retrograd.core.hooks.engine import break_graph, breaks_graph, is_compiling, uncompiled
from retrograd.core.hooks.in_graphs import is_left_alone, tell_of_break
from retrograd.core.hooks.listeners import Hook, HookEntry, hidden_hooks
from retrograd.core.hooks.module import EndHook, InputWatcher, put_readers_last, set_after, set_before
from retrograd.core.hooks.names import ArgumentNames
from retrograd.core.hooks.nested import Keys, flatten, is_among, replace_tensors
from retrograd.core.identities import IdentityDict


class CallUnderRules(Protocol):
    """A call of a module in compiled code, as its rules see it."""

    def change_value(self, keys: Keys, value: Tensor) -> Tensor:
        """What the rules make of a value; the very same object if they leave it alone."""

    def change_gradient(
        self, keys: Keys, gradient: Tensor, value: Tensor | None, inputs: Mapping[Keys, Tensor]
    ) -> Tensor:
        """What the rules make of a gradient; the very same object if they leave it alone.

        Args:
            keys: where in the slot it is.
            gradient: the gradient.
            value: the tensor that it is the gradient of, where a rule asks for it.
            inputs: what the module was called with, where a rule asks for it.
        """


class ReachedSites:
    """What the rules of one hook may reach, as far as a graph depends on it.

    Torch does not guard a graph against hooks on modules that had none. So each hook is asked for what all rules of its
    rewriting reach, too, and that is guarded: a graph is not taken for a rewriting that has rules elsewhere.

    Args:
        values: the arguments, or ``output``, on whose values rules may act.
        gradients: those on whose gradients they may.
        sites: the same in words.
        everywhere: what all rules reach that were set together, as a short text.
        needs_value: a rule asks for the value that belongs to a gradient.
        needs_input: a rule asks for what the module was called with.
    """

    __slots__ = ("everywhere", "gradients", "needs_input", "needs_value", "sites", "values")

    def __init__(
        self,
        values: tuple[str, ...] = (),
        gradients: tuple[str, ...] = (),
        sites: str = "",
        *,
        everywhere: str = "",
        needs_value: bool = False,
        needs_input: bool = False,
    ) -> None:
        self.values = values
        self.gradients = gradients
        self.sites = sites
        self.everywhere = everywhere
        self.needs_value = needs_value
        self.needs_input = needs_input


NOWHERE = ReachedSites()


class _Rewrites(Hook):
    """A hook that rewrites, or one of a pair of them.

    Attributes:
        reach: what it reaches.
        handle: by which graphs know it.
        is_compiled: it is part of a graph.
    """

    __slots__ = ("__weakref__", "_find_module", "_is_hidden", "_names", "_rewriter", "handle", "is_compiled", "reach")

    def __init__(self, module: nn.Module) -> None:
        self._find_module = weakref.ref(module)
        self.handle: Any = None
        in_graphs.expect_handle(self)
        in_graphs.hold_while_alive(in_graphs.first_graph, self)
        self.is_compiled = False
        self._is_hidden = False
        self._rewriter: Any = None
        self._names: Any = None
        self.reach = NOWHERE

    def take_handle(self, handle: Tensor) -> None:
        """Be known by this tensor."""
        self.handle = handle

    def act(self, rewriter: Any, reach: ReachedSites, names: ArgumentNames) -> None:
        """Call this rewriter from now on."""
        self._rewriter = rewriter
        self._names = names
        self.reach = reach

    def rest(self) -> None:
        """Call no rewriter."""
        self._rewriter = self._names = None
        self.reach = NOWHERE

    def stay(self) -> None:
        """Stay for as long as the module does, unseen by whoever copies it."""
        if not self._is_hidden:
            self._is_hidden = True
            in_graphs.hold_while_alive(hidden_hooks, self)

    def mark_forward(self, begins: bool, trains: bool) -> None:
        """Called when a forward of the model begins or ends inside compiled code."""
        self.is_compiled = True
        module = self._find_module()
        if self._rewriter is None or module is None:
            return
        with torch.set_grad_enabled(trains):
            if begins:
                self._rewriter.before_forward(module, (), {})
            else:
                self._rewriter.after_call(module, ())

    def begin_compiled_call(self, trains: bool, training: bool) -> CallUnderRules | None:
        """Begin a call that compiled code makes.

        Args:
            trains: grad is enabled, and a backward pass may follow.
            training: the module is in training mode.

        Returns:
            None if no rule acts any more.
        """
        self.is_compiled = True
        return None if self._rewriter is None else self._rewriter.begin_compiled_call(trains, training)

    def _trace(self, module: nn.Module, value: Any, slot: str, args: Any, kwargs: Any) -> Any:
        """Put the rules on all tensors of a value into the graph; returns what takes its place."""
        reach = self.reach
        if not reach.everywhere:
            return value
        if (reach.values or reach.gradients) and is_left_alone():
            tell_of_break(reach.sites)
            break_graph()
        given = (args, kwargs)
        tensors = []
        for keys, tensor in flatten(value, (slot,)):
            name = keys[1] if slot == "input" else slot
            on_gradient = _is_in(name, reach.gradients)
            on_value = _is_in(name, reach.values) or (on_gradient and "grad" in keys)  # by a key of that name
            if on_value or on_gradient:
                tensors.append((keys, tensor, on_value, on_gradient, slot == "input" or is_among(tensor, given)))
        if not tensors:
            return value
        inputs = list(flatten(self._names.bind(args, kwargs), ())) if reach.needs_input else []
        needs = {"needs_value": reach.needs_value, "inputs": inputs}
        new = in_graphs.wing.trace_rules(self.handle, tensors, module.training, **needs)
        return replace_tensors(value, (slot,), {each[0]: tensor for each, tensor in zip(tensors, new, strict=True)})


class _RewriteOutput(_Rewrites):
    __slots__ = ()

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        in_graphs.hold_while_alive(in_graphs.known_graphs, self)

    @property
    def keeps_values(self) -> bool:
        """Whether what is returned is what the forward has made."""
        return not self.reach.values

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if is_compiling():
            return self._trace(module, output, "output", args, kwargs)
        return None if self._rewriter is None else self._rewriter.rewrite_output(module, args, kwargs, output)


class _RewriteInput(_Rewrites):
    __slots__ = ()

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_compiling():
            if not self.reach.everywhere:
                return None
            bound = self._names.bind(args, kwargs)
            return self._names.unbind(self._trace(module, bound, "input", args, kwargs), args, kwargs)
        return None if self._rewriter is None else self._rewriter.rewrite_input(module, args, kwargs)


class _RewriteParameters(_Rewrites):
    __slots__ = ()

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_compiling():
            if not self.reach.values:
                return None
            tell_of_break(self.reach.sites)
            return self._rewrite_between_graphs(module, args, kwargs)
        return self._rewrite(module, args, kwargs)

    @breaks_graph
    def _rewrite_between_graphs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.is_compiled = True
        return self._rewrite(module, args, kwargs)

    @uncompiled
    def _rewrite(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if self._rewriter is None else self._rewriter.rewrite_input(module, args, kwargs)


class _EndParameters(_Rewrites):
    __slots__ = ()

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not is_compiling() or self.reach.values:
            self._end(module, output)

    @breaks_graph
    def _end(self, module: nn.Module, output: Any) -> None:
        if self._rewriter is not None:
            self._rewriter.end_call(module, output)


class _EndCall(_Rewrites):
    __slots__ = ()

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not is_compiling() and self._rewriter is not None:
            self._rewriter.end_call(module, output)


class _BeginForward(_Rewrites):
    __slots__ = ()

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling():
            if self.reach.everywhere:
                in_graphs.wing.trace_forward(self.handle, begins=True)
        elif self._rewriter is not None:
            self._rewriter.before_forward(module, args, kwargs)


class _EndForward(_Rewrites, EndHook):
    __slots__ = ()

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_compiling():
            if self.reach.everywhere:
                in_graphs.wing.trace_forward(self.handle, begins=False)
        elif self._rewriter is not None:
            self._rewriter.after_call(module, output)


def _is_in(name: str, names: tuple[str, ...]) -> bool:
    return name in names or "" in names


class RuleTap:
    """Hooks that rewrite, on one module, which stay there if they have become part of a graph."""

    def __init__(self, module: nn.Module, rewriter: Any, reach: ReachedSites) -> None:
        self._find_module = weakref.ref(module)
        self._hooks = self._find_resting(module) or self._set(module)
        names = ArgumentNames(module)
        for hook, entry in self._hooks:
            hook.act(rewriter, reach, names)
            entry.put_last()
        put_readers_last(module)

    def _find_resting(self, module: nn.Module) -> list[tuple[_Rewrites, HookEntry]] | None:
        with _lock:
            resting = _resting.get(module, {}).get(type(self))
            return resting.pop(0) if resting else None

    def _set(self, module: nn.Module) -> list[tuple[_Rewrites, HookEntry]]:
        """Set the hooks."""
        raise NotImplementedError

    def remove(self) -> None:
        """Take the hooks away. May be called twice."""
        hooks, self._hooks = self._hooks, []
        module = self._find_module()
        for hook, _ in hooks:
            hook.rest()
        if module is not None and any(hook.is_compiled for hook, _ in hooks):
            for hook, _ in hooks:
                hook.stay()
            with _lock:
                _resting.setdefault(module, {}).setdefault(type(self), []).append(hooks)
            return
        for _, entry in hooks:
            entry.remove()


_lock = threading.Lock()
_resting: IdentityDict[nn.Module, dict[type[RuleTap], list[list[tuple[_Rewrites, HookEntry]]]]] = IdentityDict()


def rests_on(module: nn.Module) -> bool:
    """Return whether hooks that rest on a module are part of a graph that was compiled of it."""
    return any(_resting.get(module, {}).values())


class OutputTap(RuleTap):
    """The hook after the calls of one module that changes what they return; ``remove()`` takes it away.

    Args:
        module: the module.
        rewriter: its ``rewrite_output(module, args, kwargs, output)`` returns what the module shall return.
        reach: what its rules may reach.
    """

    def _set(self, module: nn.Module) -> list[tuple[_Rewrites, HookEntry]]:
        hook = _RewriteOutput(module)
        return [(hook, set_after(module, hook, with_kwargs=True))]


class InputTap(RuleTap):
    """The hooks around the calls of one module that change its arguments; ``remove()`` takes them away.

    Args:
        module: the module.
        rewriter: its ``rewrite_input(module, args, kwargs)`` returns what the module shall be called with, and
            ``end_call(module, output)`` is given what the call returned; None for one that raised.
        reach: what its rules may reach.
    """

    def _set(self, module: nn.Module) -> list[tuple[_Rewrites, HookEntry]]:
        before, after = _RewriteInput(module), _EndCall(module)
        return [(before, set_before(module, before)), (after, set_after(module, after, always=True))]


class ParameterTap(RuleTap):
    """The hooks around the calls of one module that put values in the place of its parameters; they break a graph.

    Args:
        module: the module.
        rewriter: as that of :class:`InputTap`.
        reach: the parameters that rules may reach.
    """

    def _set(self, module: nn.Module) -> list[tuple[_Rewrites, HookEntry]]:
        before, after = _RewriteParameters(module), _EndParameters(module)
        return [(before, set_before(module, before)), (after, set_after(module, after, always=True))]


class ModelTap(RuleTap):
    """The hooks around the forwards of a model, before and after all others; ``remove()`` takes them away.

    Args:
        module: the model.
        watcher: an :class:`~retrograd.core.hooks.module.InputWatcher`.
        everywhere: as in :class:`ReachedSites`.
    """

    def __init__(self, module: nn.Module, watcher: InputWatcher, everywhere: str) -> None:
        super().__init__(module, watcher, ReachedSites(everywhere=everywhere))
        self._hooks[0][1].put_first()

    def _set(self, module: nn.Module) -> list[tuple[_Rewrites, HookEntry]]:
        before, after = _BeginForward(module), _EndForward(module)
        return [(before, set_before(module, before)), (after, set_after(module, after, always=True))]
