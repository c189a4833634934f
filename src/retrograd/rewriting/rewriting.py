"""``rg.rewrite``: what users call."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from retrograd.core.amounts import list_names
from retrograd.core.errors import CannotRewriteError, RewriteError
from retrograd.core.guesses import names_arguments
from retrograd.core.hooks import in_graphs
from retrograd.core.hooks.backward import backward_changers
from retrograd.core.hooks.compiled import has_compiled_code, may_have_run_compiled
from retrograd.core.hooks.function_taps import IN_CODE
from retrograd.core.hooks.listeners import hidden_hooks
from retrograd.core.hooks.names import (
    ModelNames,
    NamedModule,
    beginning_of,
    list_modules,
    list_swapped,
    name_models,
    parameter_site,
)
from retrograd.core.hooks.optimizer import held_by, optimizer_listeners
from retrograd.core.hooks.parts import is_compiled
from retrograd.core.hooks.rewriters import gradient_rewriters, watched_rewriters
from retrograd.core.hooks.rule_taps import InputTap, ModelTap, OutputTap, ParameterTap, ReachedSites, RuleTap, rests_on
from retrograd.core.notices import warn
from retrograd.core.ranks.sharded_gradient import ShardedParameters
from retrograd.core.sites.pattern import UNKNOWN_NODE, Candidate, describe_pattern, names_functions
from retrograd.core.sites.site import Site, parse_leniently
from retrograd.rewriting.assignments import Assignments, RuleLike, list_rules
from retrograd.rewriting.function_rewriter import FunctionRewriter
from retrograd.rewriting.joint_rewriter import SITE as JOINT
from retrograd.rewriting.joint_rewriter import JointRewriter
from retrograd.rewriting.module_rewriter import InputRewriter, OutputRewriter, WatchedRewriter
from retrograd.rewriting.parameter_rewriter import ParameterRewriter, ParameterValueRewriter
from retrograd.rewriting.rules.rule import Rule
from retrograd.rewriting.site_rewriter import RewriterFactory
from retrograd.rewriting.uncalled import UncalledModules

_SHOWN = 5
"""Memories that a warning names."""


class Rewriting:
    """Rules that act until they are removed; use it in a ``with`` statement, or call ``remove()``."""

    def __init__(self, assignments: Assignments | None, rules: list[Rule]) -> None:
        self._assignments = assignments
        self._rules = rules
        self._roots: list[ModelTap] = []
        self._taps: list[RuleTap] = []
        self._inputs: list[InputRewriter] = []
        self._parameters: list[ParameterRewriter] = []
        self._watched: WatchedRewriter | None = None
        self._functions: FunctionRewriter | None = None
        self._joint: JointRewriter | None = None
        self._modules: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()
        self._models = ModelNames()
        self._reached: dict[str, weakref.ref[nn.Module]] = {}
        self._everywhere = ""
        self._uncalled = UncalledModules()
        self._undo: list[Callable[[], None]] = []
        self._factory = RewriterFactory(assignments)
        self.clock = self._factory.clock

    @property
    def is_active(self) -> bool:
        """True while the rules act."""
        return self._factory.is_active

    @property
    def step(self) -> int:
        """Updates that optimizers have made, as rules are told."""
        return self.clock.step

    def remove(self) -> None:
        """Let no rule act any more, also on graphs that are alive. Calling it twice is harmless."""
        if not self.is_active:
            return
        self._detach()
        self._warn_of_unreached()

    def _warn_of_unreached(self) -> None:
        if self._assignments is not None:
            unreached = self._assignments.unreached()
            functions = [each for each in unreached if names_functions(each.pattern)]
            others = [describe_pattern(each.pattern) for each in unreached if each not in functions]
            self._uncalled.warn_of_unreached(others, was_run=self.clock.was_run)
            if self._functions is not None and functions and self.clock.was_run:
                names = ", ".join(describe_pattern(each.pattern) for each in functions)
                hint = self._functions.explain(functions[0].pattern)
                warn(f"No rule has acted at {names}: no such function was called. {hint}")
            elif self._functions is not None and self._functions.has_compiled:
                warn(f"Rules on functions have not acted in all of the model. {IN_CODE}")
        self._warn_of_swapped()

    def _warn_of_swapped(self) -> None:
        swapped = list_swapped([(path, find()) for path, find in self._reached.items()], list_modules(self._models))
        if swapped:
            warn(
                f"At {list_names(swapped)} a module with rules was replaced: none "
                "acted on the new one. Call rg.rewrite() after such a change."
            )

    def _detach(self) -> None:
        self._factory.is_active = False
        while self._undo:
            self._undo.pop()()
        for root in self._roots:
            root.remove()
        for tap in self._taps:
            tap.remove()
        for inputs in self._inputs:
            inputs.remove()
        for parameter in self._parameters:
            parameter.let_go()
        if self._watched is not None:
            watched_rewriters.remove(self._watched)
        if self._functions is not None:
            self._functions.remove()
        if self._joint is not None:
            self._joint.remove()
        self._uncalled.remove()
        hidden_hooks.release()

    def state_dict(self) -> dict[str, Any]:
        """State that a checkpoint must hold for the rules to go on with the same decisions."""
        return {"step": self.clock.step, "rules": [(rule.name, rule.state_dict()) for rule in self._rules]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict()`` gave; memories of sites where its rules do not act here are warned of.

        Raises:
            RewriteError: if it was given by other rules.
        """
        if not isinstance(saved, Mapping) or saved.keys() != {"step", "rules"}:
            raise RewriteError("This is not a Rewriting.state_dict().", repair="give what `state_dict()` returned.")
        names, ours = [name for name, _ in saved["rules"]], [rule.name for rule in self._rules]
        if names != ours:
            raise RewriteError(
                f"The state is of the rules {', '.join(names)}; these are {', '.join(ours)}.",
                repair="give the same rules in the same order before loading.",
            )
        self.clock.step = int(saved["step"])
        for rule, (_, state) in zip(self._rules, saved["rules"], strict=True):
            rule.load_state_dict(state)
        self._warn_of_other_sites(saved["rules"])

    def _warn_of_other_sites(self, saved: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        others = [
            f"{name} at {site}"
            for rule, (name, state) in zip(self._rules, saved, strict=True)
            for site, memory in state.items()
            if isinstance(memory, Mapping) and memory and not self._may_act(rule, site)  # else a rule's own entry
        ]
        if others:
            more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
            warn(
                f"The state has memories of {', '.join(others[:_SHOWN])}{more}, where these rules do not act now: "
                "they were set on other sites, or the model had others. Rules at sites without a memory start over."
            )

    def _may_act(self, rule: Rule, name: str) -> bool:
        if self._assignments is None:
            return name == str(JOINT)
        site = parse_leniently(name)
        module, node = self._modules.get(site.path), None
        if module is None and self._functions is not None:  # which nodes a function makes is not known before
            module, node = self._modules.get(site.path.rpartition("/")[0]), UNKNOWN_NODE
        is_there = module is not None or site.is_watched
        possible = self._assignments.list_possible(Candidate(site, module, node))
        return is_there and any(each is rule for each in possible)

    # ---- setting up -------------------------------------------------------------------------------------------

    def attach_to_models(self, models: Mapping[str, nn.Module]) -> None:
        """Set hooks wherever a rule may act."""
        assert self._assignments is not None
        entries = list_modules(models.items())
        self._modules.update((entry.path, entry.module) for entry in entries)
        for name, model in models.items():
            self._models.add(name, model)
        candidates = [candidate for entry in entries for candidate in entry.candidates()]
        self._assignments.check(candidates)
        hidden_hooks.hold()
        try:
            self._everywhere = self._describe_reach(candidates)
            for model in models.values():
                self.clock.steps.add_parameters(model.parameters())
                self._roots.append(ModelTap(model, self.clock, self._everywhere))
            self._uncalled.watch(entries)
            late = _late_regions(entries)
            seen: set[int] = set()
            for entry in entries:
                self._attach_to_calls(entry, late)
                self._attach_to_gradients(entry, seen)
                if any(map(self._assignments.list_possible, entry.candidates())):
                    self._reached[entry.path] = weakref.ref(entry.module)
            self._attach_to_watched()
            if FunctionRewriter.are_named(self._assignments.selections):
                self._functions = FunctionRewriter(self._factory, self._assignments, self._models)
                self._functions.attach()
            self._listen()
        except BaseException:
            self._detach()
            raise

    def attach_to_optimizer(self, optimizer: Optimizer) -> None:
        """Let the rules act on its gradients together."""
        self.clock.steps.add_parameters(held_by(optimizer))
        self._joint = JointRewriter(optimizer, self._rules, self.clock)
        hidden_hooks.hold()
        self._listen()

    def _listen(self) -> None:
        backward_changers.add(self)
        optimizer_listeners.add(self.clock)
        gradient_rewriters.add(self)
        self._undo += [
            lambda: gradient_rewriters.remove(self),
            lambda: backward_changers.remove(self),
            lambda: optimizer_listeners.remove(self.clock),
        ]

    def _attach_to_calls(self, entry: NamedModule, late: tuple[str, ...]) -> None:
        assert self._assignments is not None
        if not entry.is_called:
            return
        wanted = [each.site for each in entry.candidates() if self._assignments.may_reach(each)]
        names = {parameter_site(entry.path, name): name for name, _ in entry.parameters}
        parameters = [names[site] for site in wanted if site in names]
        slots = {site.slot for site in wanted}
        if not parameters and not slots & {"input", "output"}:
            return
        needs_input = any(
            rule.needs_input for each in entry.candidates() for rule in self._assignments.list_possible(each)
        )
        _check_module(entry, late, parameters)
        if parameters:
            values = ParameterValueRewriter(self._factory, entry.module, entry.path, parameters)
            self._inputs.append(values)
            self._uncalled.add(entry, values.rewriters, on_value=True)
            sites = ", ".join(str(parameter_site(entry.path, name)) for name in parameters)
            # a wrapper may compute it again without itself
            self._taps.append(
                ParameterTap(
                    entry.module, values, ReachedSites(tuple(parameters), sites=sites, everywhere=self._everywhere)
                )
            )
        inputs = None
        if "input" in slots or needs_input:
            inputs = InputRewriter(self._factory, entry.module, entry.path, notes_inputs=needs_input)
            self._inputs.append(inputs)
            reach = self._find_reach(entry, "input")
            self._taps.append(InputTap(entry.tapped, inputs, reach))
            if "input" in slots:
                self._uncalled.add(entry, inputs.rewriters, on_value=bool(reach.values))
        if "output" in slots:
            outputs = OutputRewriter(self._factory, entry.module, entry.path, inputs)
            reach = self._find_reach(entry, "output")
            self._taps.append(OutputTap(entry.tapped, outputs, reach))
            self._uncalled.add(entry, outputs.rewriters, on_value=bool(reach.values))

    def _describe_reach(self, candidates: Iterable[Candidate]) -> str:
        """What all rules reach, and what they ask for, as a short text."""
        assert self._assignments is not None
        found = hashlib.blake2b(digest_size=16)
        for each in candidates:
            for rule in self._assignments.list_possible(each):
                found.update(f"{each.site} {rule.needs_value} {rule.needs_input}\n".encode())
        return found.hexdigest()

    def _find_reach(self, entry: NamedModule, slot: str) -> ReachedSites:
        """What compiled code has to ask the rules about, of the inputs or of the outputs of a module."""
        assert self._assignments is not None
        found: dict[str, list[str]] = {"value": [], "grad": []}
        rules: list[Rule] = []
        sites: list[str] = []
        for each in entry.candidates():
            is_value = each.site.quantity == "value"
            if each.site.slot != slot or (is_value and not self._assignments.may_reach_value(each)):
                continue
            possible = self._assignments.list_possible(each)
            if possible and each.site.quantity in found:
                found[each.site.quantity].append(slot if slot == "output" else "".join(each.site.keys[1:2]))
                rules += possible
                sites.append(str(each.site))
        return ReachedSites(
            tuple(found["value"]),
            tuple(found["grad"]),
            ", ".join(sites),
            everywhere=self._everywhere,
            needs_value=any(rule.needs_value for rule in rules),
            needs_input=any(rule.needs_input for rule in rules),
        )

    def _attach_to_gradients(self, entry: NamedModule, seen: set[int]) -> None:
        for name, parameter in entry.parameters:
            site = parameter_site(entry.path, name).grad
            rules = self._factory.find_rules(Candidate(site, entry.module))
            if not rules or id(parameter) in seen:  # a parameter with two names has one gradient
                continue
            seen.add(id(parameter))
            chain = self._factory.make_chain(rules, entry.module, site)
            self._parameters.append(ParameterRewriter(self._factory, entry.module, name, parameter, chain))

    def _attach_to_watched(self) -> None:
        assert self._assignments is not None
        if self._assignments.may_reach_watched():
            self._watched = WatchedRewriter(self._factory, self._assignments)
            watched_rewriters.add(self._watched)
            in_graphs.known_graphs.hold()
            self._undo.append(in_graphs.known_graphs.release)

    # ---- what it is told --------------------------------------------------------------------------------------

    def try_rules(self, module: nn.Module, site: Site, gradient: Tensor) -> Tensor:
        """Try the rules for a site on a gradient; they learn nothing by it."""
        rules = self._factory.find_rules(Candidate(site, module))
        if not rules or not self.is_active:
            return gradient
        chain = self._factory.make_chain(rules, module, site.first_call)
        return chain.change_again(gradient, site.call, module.training, chain.remember())

    def backward_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        """Begin a pass from these tensors."""
        # else the graph is of a forward before the rules were set
        if self.clock.was_run or (has_compiled_code() and in_graphs.load().runs_compiled_code(roots)):
            self._uncalled.pass_begins()
        self.clock.backward_begins(roots)
        if self._functions is not None:
            self._functions.pass_begins()
        sharded = ShardedParameters() if any(each.may_be_sharded for each in self._parameters) else None
        for parameter in self._parameters:
            parameter.attach(sharded)  # it may have begun to train, or another may be in its place
            parameter.pass_begins()
        if self._joint is not None:
            self._joint.attach()
            self._joint.pass_begins()
        self._factory.views.check(forgets=self.clock.here.depth == 0)

    def backward_ends(self, failed: bool) -> None:
        """End the pass."""
        try:
            for parameter in self._parameters:
                parameter.pass_ends(failed)
            if self._joint is not None:
                self._joint.pass_ends(failed)
        except BaseException:
            for parameter in self._parameters:
                parameter.pass_ends(failed=True)
            raise
        finally:
            self.clock.backward_ends(failed)
            if self._functions is not None:
                self._functions.pass_ends()
        self._uncalled.pass_ends(failed)

    def __enter__(self) -> Self:
        if not self.is_active:
            raise RewriteError(
                "These rules were removed.",
                repair="call rg.rewrite() again for each block; the rules themselves may be the same.",
                reason="entered again none would act.",
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.is_active:
            return
        self._detach()
        if kind is None:  # else it may still have been reached
            self._warn_of_unreached()

    def __repr__(self) -> str:
        state = "" if self.is_active else ", removed"
        return f"<Rewriting with {', '.join(rule.name for rule in self._rules)}, step {self.step}{state}>"


@names_arguments
def rewrite(
    target: nn.Module | Mapping[str, nn.Module] | Optimizer | None,
    rules: Mapping[Any, RuleLike | Iterable[RuleLike]] | RuleLike | Iterable[RuleLike],
) -> Rewriting:
    """Let rules change activations and gradients while a model runs and trains.

    What a rule returns in the backward pass is what flows on, so everything before it sees the change. A rule on
    ``x:input.grad`` changes what flows through that module alone. Whatever is recorded of a site is what the last of
    its rules has made of it.

    Args:
        target: a module, or modules by name, whose names then lead the names of their sites. Or an optimizer: then the
            rules act on all its gradients as on one vector, right before the update. None for rules on watched tensors
            alone.
        rules: for modules: rules by site, ``{"blocks.*:output.grad": rg.rules.ClipNorm(1.0)}``; a rule, or a list of
            them that act in that order. Rules of several patterns that match one site act in the order of the mapping.
            A rule is a function ``(value, state) -> tensor or None``, or a
            :class:`~retrograd.rewriting.rules.rule.Rule`.
            For an optimizer: a rule, or a list of them.

    Returns:
        a handle: a context manager, with ``remove()``, ``state_dict()`` and ``load_state_dict()``.

    Raises:
        SiteError: for an invalid pattern, or one that matches nothing (the nearest sites are named).
        RuleError: for something that is not a rule.
        CannotRewriteError: where a rule would not be asked.
        AttachError: for something that is not a model.
    """
    optimizer = _as_optimizer(target)
    if optimizer is not None:
        rewriting = Rewriting(None, list_rules(rules))
        rewriting.attach_to_optimizer(optimizer)
        return rewriting
    # a target of another kind is told what is wrong with it
    models = {} if target is None else name_models(target)  # type: ignore[arg-type]
    assignments = Assignments(rules)
    distinct = {id(rule): rule for each in assignments.all for rule in each.rules}
    rewriting = Rewriting(assignments, list(distinct.values()))
    rewriting.attach_to_models(models)
    return rewriting


def _as_optimizer(target: object) -> Optimizer | None:
    if isinstance(target, nn.Module):
        return None
    inner = getattr(target, "optimizer", None)  # the wrappers of trainers, some of which are optimizers themselves
    return next((each for each in (inner, target) if isinstance(each, Optimizer)), None)


def _check_module(entry: NamedModule, late: tuple[str, ...], parameters: list[str]) -> None:
    if late and entry.path.startswith(late) and (entry.tapped is entry.module or parameters):
        raise CannotRewriteError(
            f"{entry.path} has been compiled and run, so that no rule can act there.",
            repair="call torch.compiler.reset() first: the model is compiled once more, with its rules.",
            reason="compiled code does not ask for hooks that were set after it was compiled.",
        )
    if parameters and isinstance(entry.module, torch.jit.ScriptModule):
        raise CannotRewriteError(
            f"{entry.path} has been compiled, so that the values of its parameters cannot be rewritten.",
            repair="set a rule on the module's output, or on the gradient of its parameters.",
            reason="what torch.jit has compiled finds them by itself.",
        )
    if parameters and isinstance(entry.module, nn.RNNBase):
        raise CannotRewriteError(
            f"The values of the parameters of {entry.path} cannot be rewritten.",
            repair="set a rule on the module's output, or on the gradient of its parameters.",
            reason=f"{type(entry.module).__name__} holds them in a list of its own.",
        )


def _late_regions(entries: list[NamedModule]) -> tuple[str, ...]:
    """Beginnings of the paths of all modules in regions that have been compiled and run without any rule in them."""
    regions = [entry for entry in entries if is_compiled(entry.tapped) and may_have_run_compiled(entry.module)]
    resting = [entry.path for entry in entries if rests_on(entry.module)] if regions else []
    beginnings = [beginning_of(region.path) for region in regions]
    return tuple(each for each in beginnings if not any(path.startswith(each) for path in resting))
