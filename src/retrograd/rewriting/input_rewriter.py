"""Rules on what a module is called with, on its gradient through this module alone, and on the values of parameters.

While a module is called, an attribute of it stands for a parameter whose value has rules: it is found before the
parameter of that name, which stays where it is. All threads see it, so such a module is called by one thread at a time.
Several rewritings may each put something there; whoever comes later has what those before it have made, and they leave
in any order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from retrograd.errors import CannotRewriteError
from retrograd.hooks.calls import count_calls
from retrograd.hooks.engine import current_graph_task, next_sequence_number
from retrograd.hooks.gradients import change_input_gradient
from retrograd.hooks.names import ArgumentNames, parameter_site
from retrograd.hooks.nested import Keys, flatten, replace_tensors
from retrograd.rewriting.chain import Noted
from retrograd.rewriting.clock import CallNumbers, NumberedCall, has_gradient
from retrograd.rewriting.site_rewriter import RewriterFactory, SiteRewriter, SiteRewriters

_lock = threading.Lock()


class ParameterOverrides:
    """Puts values in the place of the parameters of one module; the same object for all that rewrite it."""

    def __init__(self) -> None:
        self._alone = threading.RLock()
        self._layers: dict[str, list[tuple[object, Any]]] = {}

    def enter(self) -> None:
        """A call begins; wait until no other thread is in one."""
        self._alone.acquire()

    def find(self, module: nn.Module, name: str) -> Any:
        """The value in the place of a parameter now; None where the parameter itself is used."""
        return vars(module).get(name)

    def put(self, module: nn.Module, name: str, call: object, value: Any) -> None:
        """Let ``value`` stand for a parameter until this call ends."""
        attributes = vars(module)
        if name not in self._layers:
            self._layers[name] = [(None, attributes[name])] if name in attributes else []
        self._layers[name].append((call, value))
        attributes[name] = value

    def leave(self, module: nn.Module, call: object) -> None:
        """This call has ended: what it had put there stands for nothing any more."""
        attributes = vars(module)
        for name, layers in list(self._layers.items()):
            layers[:] = [layer for layer in layers if layer[0] is not call]
            if layers:
                attributes[name] = layers[-1][1]
            else:
                attributes.pop(name, None)
            if all(owner is None for owner, _ in layers):
                del self._layers[name]
        self._alone.release()


_overrides: WeakKeyDictionary[nn.Module, ParameterOverrides] = WeakKeyDictionary()


def overrides_of(module: nn.Module) -> ParameterOverrides:
    """The overrides of this module."""
    with _lock:
        return _overrides.setdefault(module, ParameterOverrides())


_INPUT: Keys = ("input",)


class _BranchedArgument:
    """An argument that was branched off for the module, so that its gradient through the module can be changed."""

    __slots__ = ("edge", "node", "number", "rewriter", "tensor", "version")

    def __init__(self, rewriter: SiteRewriter, tensor: Tensor, edge: GradientEdge, number: int) -> None:
        self.rewriter = rewriter
        self.tensor = tensor
        self.node = tensor.grad_fn
        self.edge = edge
        self.number = number
        self.version = tensor._version


class _Running:
    """A call that has begun and not ended."""

    __slots__ = ("again", "call", "has_overrides", "inputs", "uses")

    def __init__(self, call: NumberedCall | None, *, again: bool) -> None:
        self.call = call
        self.again = again
        self.has_overrides = False
        self.inputs: dict[str, Noted] = {}
        self.uses: list[_BranchedArgument] = []


class _RunningCalls(threading.local):
    def __init__(self) -> None:
        self.running: list[_Running] = []
        self.inputs: dict[str, Noted] = {}


class InputRewriter:
    """Lets rules act on what one module computes with.

    Args:
        factory: makes the rewriters, and has the clock.
        module: the module.
        path: its path.
        parameters: names of its parameters, if it is their values that have rules, and not its arguments.
        notes_inputs: a rule asks for what goes into the module.
    """

    def __init__(
        self,
        factory: RewriterFactory,
        module: nn.Module,
        path: str,
        parameters: Sequence[str],
        *,
        notes_inputs: bool = False,
    ) -> None:
        self._factory = factory
        self._find_module = weakref.ref(module)
        self._path = path
        self._rewriters = SiteRewriters(factory, module, path)
        self._calls = CallNumbers(factory.clock)
        self._names = ArgumentNames(module)
        self._parameters = tuple(parameters)
        self._notes_inputs = notes_inputs
        self._overrides = overrides_of(module)
        self._here = _RunningCalls()

    def rewrite_input(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The forward pre-hook."""
        self._end_interrupted(module)
        if not self._factory.is_active:
            return args, kwargs
        if self._factory.clock.is_outside:
            self._factory.clock.part_begins(module, args, kwargs)
        again = current_graph_task() != -1
        running = _Running(self._calls.find_again() if again else self._calls.begin(), again=again)
        self._here.running.append(running)
        if self._parameters:
            self._overrides.enter()
            running.has_overrides = True
        for name in self._parameters:
            self._put_parameter(module, name, running)
        return (args, kwargs) if self._parameters else self._change_arguments(module, args, kwargs, running)

    def end_call(self, module: nn.Module, output: Any) -> None:
        """The forward hook, called with None for a call that raised."""
        if not self._here.running:  # a hook before ours has raised
            return
        running = self._here.running.pop()
        self._here.inputs = running.inputs
        self._uncover(module, running)
        if output is None or not running.uses:
            return
        outputs = [tensor for _, tensor in flatten(output, ()) if tensor.requires_grad]
        for use in running.uses:
            if use.tensor._version != use.version:
                self._watch_overwritten(use, outputs)
            elif any(each._base is use.tensor._base for each in outputs):  # who gets it may write into it
                self._factory.watch_view(use.rewriter.name, use.tensor)

    def take_inputs(self) -> dict[str, Noted]:
        """Take the inputs of the call that has just ended, by argument."""
        inputs, self._here.inputs = self._here.inputs, {}
        return inputs

    def remove(self) -> None:
        """The rules act no more, maybe in the middle of a call."""
        module = self._find_module()
        for running in reversed(self._here.running):
            if module is not None:
                self._uncover(module, running)

    def _end_interrupted(self, module: nn.Module) -> None:
        """A call that was left by KeyboardInterrupt runs no hook at its end."""
        running = self._here.running
        if running:
            around = max(0, count_calls(module) - 1)  # none are seen from compiled code
            while len(running) > around:
                self._uncover(module, running.pop())

    def _uncover(self, module: nn.Module, running: _Running) -> None:
        if running.has_overrides:
            running.has_overrides = False
            self._overrides.leave(module, running)

    def _change_arguments(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], running: _Running
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = self._names.bind(args, kwargs)
        changed = self._change_tensors(module, bound, running)
        return (args, kwargs) if changed is bound else self._names.unbind(changed, args, kwargs)

    def _change_tensors(self, module: nn.Module, bound: dict[str, Any], running: _Running) -> dict[str, Any]:
        number = running.call.number if running.call is not None else 1
        changed: dict[Keys, Tensor] = {}
        reached: list[tuple[Keys, SiteRewriter, Tensor]] = []
        for keys, tensor in flatten(bound, _INPUT):
            rewriter = self._rewriters.find(keys, number)
            value = tensor
            if rewriter is not None:
                value = rewriter.change_value(tensor, running.call, module.training, again=running.again)
                reached.append((keys, rewriter, value))
            if value is not tensor:
                changed[keys] = value
            if self._notes_inputs:
                running.inputs[".".join(keys[1:])] = Noted(value)
        for keys, rewriter, value in reached if has_gradient(running.call, again=running.again) else ():
            new = self._watch_use(rewriter, value, running, module.training)
            if new is not value:
                changed[keys] = new
        return replace_tensors(bound, _INPUT, changed) if changed else bound

    def _watch_use(self, rewriter: SiteRewriter, tensor: Tensor, running: _Running, training: bool) -> Tensor:
        if not tensor.requires_grad or not rewriter.acts_on_gradient:
            return tensor
        edge, number = get_gradient_edge(tensor), next_sequence_number()
        branched = rewriter.watch(tensor, training, branches=True, is_private=True, inputs=running.inputs)
        if branched is not tensor:
            running.uses.append(_BranchedArgument(rewriter, branched, edge, number))
        return branched

    def _watch_overwritten(self, use: _BranchedArgument, outputs: list[Tensor]) -> None:
        """A module that writes into its argument has taken the node of ours out of the way."""
        rewriter, guard = use.rewriter, self._factory.clock.guard
        if (
            rewriter.needs_value
            or rewriter.needs_input
            or not change_input_gradient(use.edge, outputs, use.number, rewriter.change_gradient, guard, use.node)
        ):
            raise CannotRewriteError(
                f"{use.rewriter.name} is written into by its module, so that its gradient cannot be changed there.",
                repair="let the module work out of place (inplace=False), or set the rule on its output's gradient.",
                reason="what is computed with the overwritten tensor hands its gradient on in several parts.",
            )

    def _put_parameter(self, module: nn.Module, name: str, running: _Running) -> None:
        rewriter = self._rewriters.find(
            parameter_site(self._path, name).keys, running.call.number if running.call is not None else 1
        )
        if rewriter is None:
            return
        if name not in module._parameters:
            raise CannotRewriteError(
                f"{rewriter.name} is no longer a parameter, so that its value cannot be rewritten.",
                repair="set the rules after parametrizing or pruning the module.",
            )
        parameter = module._parameters[name]
        if parameter is None:
            return
        earlier = self._overrides.find(module, name)  # of another rewriting, or of a call around this one
        is_recursive = len(self._here.running) > 1
        value = parameter if earlier is None or is_recursive else earlier
        changed = rewriter.change_value(value, running.call, module.training, again=running.again)
        if changed is not value:
            self._overrides.put(module, name, running, changed)
