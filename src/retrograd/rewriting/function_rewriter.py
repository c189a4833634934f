"""Rules on what functions return that modules call, and on the gradients of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from torch import Tensor, nn

from retrograd.core.errors import CannotRewriteError
from retrograd.core.hooks.engine import is_in_backward, uncompiled
from retrograd.core.hooks.function_taps import FunctionTap
from retrograd.core.hooks.names import ModelNames
from retrograd.core.hooks.nested import flatten
from retrograd.core.hooks.saved import version_of
from retrograd.core.hooks.torch_calls import TorchCall, is_statement
from retrograd.core.sites.pattern import UNKNOWN_NODE, Candidate, describe_pattern
from retrograd.core.sites.site import Site
from retrograd.rewriting.assignments import Assignments
from retrograd.rewriting.chain import Beside, Noted
from retrograd.rewriting.clock import CallNumbers
from retrograd.rewriting.site_rewriter import RewriterFactory, SiteRewriters


class _Taken(NamedTuple):
    """What a function is called with: its tensors with their versions, and where a rule asks for them the inputs."""

    versions: list[tuple[Tensor, int]]
    given: Mapping[str, Tensor]
    inputs: Mapping[str, Noted]


class _Function(NamedTuple):
    rewriters: SiteRewriters
    calls: CallNumbers


class FunctionRewriter(FunctionTap[_Function]):
    """Lets rules act on functions that the modules of some models call.

    Args:
        factory: makes the rewriters, and has the clock.
        assignments: the rules by their sites.
        models: names the modules.
    """

    height = 1

    def __init__(self, factory: RewriterFactory, assignments: Assignments, models: ModelNames) -> None:
        super().__init__(models, assignments.selections)
        self._factory = factory
        self._assignments = assignments
        self._needs_input = any(
            rule.needs_input for each in assignments.all if each.selection.names_functions for rule in each.rules
        )

    def is_wanted(self, module: nn.Module) -> bool:
        """A module is called that no other has called: a model, or a part of one by itself."""
        clock = self._factory.clock
        if self._models.name_of(module) is None and clock.here.depth == 0:
            clock.part_begins(module, (), {})
        return True

    def make_entry(self, module: nn.Module, path: str, node: str) -> _Function | None:
        """The rules for what a function returns, if there may be one."""
        site = Site(path, ("output",))
        unknown = Candidate(site.grad, module, node)
        named = (each for each in self._assignments.all if node == UNKNOWN_NODE and each.selection.asks_for_nodes)
        if found := next((each for each in named if each.selection.wants(unknown)), None):
            raise CannotRewriteError(
                f"{describe_pattern(found.pattern)} names nodes, and {path} makes its own only when its checkpoint "
                "computes it again.",
                repair=f"name the function, '{path}:output.grad', or checkpoint with use_reentrant=False.",
                reason="which call a node belongs to is known in the forward, which runs here without a graph.",
            )
        if not any(self._assignments.may_reach(Candidate(each, module, node)) for each in (site, site.grad)):
            return None
        return _Function(SiteRewriters(self._factory, module, path, node), CallNumbers(self._factory.clock))

    @uncompiled
    def take(self, call: TorchCall) -> _Taken:
        """Note what the function is called with."""
        versions = [(tensor, version_of(tensor)) for tensor in call.operands]
        if not self._needs_input:
            return _Taken(versions, {}, {})
        names = {str(index): value for index, value in enumerate(call.args)} | call.kwargs
        given = {".".join(keys): tensor for keys, tensor in flatten(names, ())}
        return _Taken(versions, given, {name: Noted(tensor) for name, tensor in given.items()})

    @uncompiled
    def show(self, entry: _Function, call: TorchCall, taken: _Taken) -> None:
        """Let the rules act on what it has returned."""
        again = is_in_backward()
        module = entry.rewriters.module
        left = [tensor for tensor, version in taken.versions if version_of(tensor) == version]
        new = entry.rewriters.rewrite(
            call.result,
            ("output",),
            entry.calls.find_again() if again else entry.calls.begin(),
            module is None or module.training,
            again=again,
            given=left,  # a tensor that is written into has no other use: there is only the new one
            inputs=taken.inputs,
            beside=Beside(None, taken.inputs, taken.given) if taken.inputs else None,
        )
        if new is not call.result and call.name.endswith("_") and is_statement(call.frame):
            raise CannotRewriteError(
                f"{entry.rewriters.path}:output cannot be rewritten: nobody takes what `{call.name}` returns.",
                repair=f"write `x = x.{call.name.rstrip('_')}()`, or set the rule on its gradient.",
                reason="the program goes on with the tensor that was written into, and not with what a rule returns.",
            )
        call.result = new

    def fail(self, error: Exception) -> NoReturn:
        """A rule has raised, or cannot act: the program is told."""
        raise error
