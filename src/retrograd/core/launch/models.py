"""The models that a program trains: found while it runs, and named as the program names them."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.optimizer import Optimizer

from retrograd.core.errors import RecordingError
from retrograd.core.frames import read_locals
from retrograd.core.hooks.discovery import ModelDiscovery
from retrograd.core.hooks.engine import has_transform
from retrograd.core.hooks.live_objects import list_instances
from retrograd.core.hooks.optimizer import held_by
from retrograd.core.hooks.parts import (
    children_of,
    has_compiled_part,
    has_other_weights,
    is_complete,
    modules_of,
    own_parameters,
    parameters_of,
)
from retrograd.core.identities import IdentityDict, IdentitySet
from retrograd.core.limits import LIMITS
from retrograd.core.ranks.stages import is_rehearsal

PATIENCE = 20
"""Steps without a new model after which the program is taken to have shown all it has."""


_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "_FabricModule"}

_NOT_OF_PROGRAM = (f"{Path(__file__).parents[2]}/", f"{Path(torch.__file__).parent}/")
"""Whose variables say nothing of what the program calls a model."""


class Search:
    """Watches forward calls until it knows all models, and again when there are new parameters or optimizers of them.

    A model is found when one of its modules is called with grad mode on, just before that call. With it come all
    models that have parameters in an optimizer by then. One whose calls torch does not tell of (a ``__call__`` of its
    own, compiled code, the inside of a Function) is found when a backward pass or an update begins, by its optimizer.
    What has no parameter (a loss) is left alone.

    Args:
        found: called with models that are new, or have new modules, and with the module that is about to run; None
            for models that have run before.
        optimizer_made: called when an optimizer has got parameters, from its constructor or later.
        failed: called when the search ends before its time.
        left_out: called with what could not be looked at, and why; all else is looked at as before.
        earlier: modules and optimizers that were there before, of which none is found unless it is used.
    """

    def __init__(
        self,
        found: Callable[[list[nn.Module], nn.Module | None], None],
        optimizer_made: Callable[[], None],
        failed: Callable[[Exception], None],
        left_out: Callable[[object, Exception], None],
        earlier: Iterable[nn.Module | Optimizer] = (),
    ) -> None:
        self._found = found
        self._optimizer_made = optimizer_made
        self._failed = failed
        self._left_out = left_out
        self._parents = ModuleParents(earlier)
        self._models: IdentitySet[nn.Module] = IdentitySet()
        self._known: IdentitySet[nn.Module] = IdentitySet()
        self._uncalled: IdentitySet[nn.Module] = IdentitySet()
        self._settled: IdentitySet[Optimizer] = IdentitySet()
        self._unsettled: IdentitySet[Optimizer] = IdentitySet()
        self._count = 0
        self._steps = 0
        self._has_trained = self._traced = False
        self._lock = threading.RLock()
        self._discovery = ModelDiscovery(self)
        self._look_again()

    def stop(self) -> None:
        """Find nothing more."""
        self._discovery.stop()

    def close(self) -> None:
        """Stop, and take all hooks away. Not to be called from one."""
        self._discovery.close()

    def step_made(self) -> None:
        """The program has trained one step more."""
        self._steps += 1
        if self._steps == PATIENCE and not self._traced:
            self._discovery.disarm()

    def module_joins(self, parent: nn.Module, child: nn.Module) -> None:
        self._parents.learn(parent, child)

    def parameter_made(self, module: nn.Module) -> None:
        self._look_again()

    def module_called(self, module: nn.Module) -> None:
        if is_rehearsal():
            return
        if module not in self._known:
            with self._lock:
                self._meet(module)
        elif module in self._uncalled:
            with self._lock:
                self._call_first(module)

    def _meet(self, module: nn.Module) -> None:
        """Find the model of a module that is called for the first time."""
        if _makes_parameter():
            return
        if _is_slice(module, self._known):
            self._known.add(module)
            return
        is_early = not self._has_trained or len(self._unsettled) or has_transform()
        if is_early and has_other_weights(self._parents.find_model(module)):
            return  # it may run with its own at another time, or be found by its optimizer
        try:
            if next(parameters_of(self._parents.find_model(module)), None) is not None:
                self._parents.look_around()
                self._add([self._parents.find_model(module)], module)
                if any(has_compiled_part(model) for model in self._models):
                    self._discovery.disarm()  # before torch.compile takes our hook for a part of the model
        finally:
            self._known.update(modules_of(module))

    def _call_first(self, module: nn.Module) -> None:
        """A module is the first to be called of a model that was found by its optimizer."""
        model = self._parents.find_model(module)
        for each in (module, *modules_of(model)):
            self._uncalled.discard(each)
        if module is not model:
            self._found([], module)

    def compiled_function_called(self) -> None:
        """A compiled function runs: the models that it may call, whose hooks it must find, are all that are trained."""
        with self._lock:
            self._parents.look_around()
            if self._parents.has_optimizers and self._add([]):
                self._discovery.disarm()  # before torch.compile takes our hook for a part of the function

    def has_optimizers(self) -> bool:
        """Return whether the program has made an optimizer."""
        with self._lock:
            self._parents.look_around()
            return self._parents.has_optimizers

    def passes_over(self, model: nn.Module) -> bool:
        """Return whether there are optimizers, as of the last look around, and none holds a parameter of a model."""
        return self._parents.has_optimizers and not self._parents.is_trained(model)

    @property
    def blind_call(self) -> str:
        """Line of the first call of a module with gradients switched off; empty where there was none."""
        return self._discovery.blind_call

    def pass_begins(self) -> None:
        """A backward pass begins: find the models of optimizers that have come since the last one."""
        if self._has_trained and not len(self._unsettled):
            return
        with self._lock:
            is_first, self._has_trained = not self._has_trained, True
            if is_first and not self._count:
                self._parents.look_around()
                if self._parents.has_optimizers:  # else any model of the process would be taken for one that is trained
                    self._traced |= self._add([])
            for optimizer in self._unsettled:
                self._settle(optimizer, has_run=True)

    def parameters_given(self, optimizer: Optimizer) -> None:
        if optimizer not in self._unsettled and not self._knows(optimizer):
            self._settled.discard(optimizer)
            self._unsettled.add(optimizer)
            self._look_again()
        self._parents.use(optimizer)
        self._optimizer_made()

    def update_begins(self, optimizer: Optimizer, has_closure: bool) -> None:
        if optimizer not in self._settled:
            with self._lock:
                self._parents.use(optimizer)
                self._settle(optimizer, has_run=not has_closure)
        self.step_made()

    def _settle(self, optimizer: Optimizer, *, has_run: bool) -> None:
        """Make sure that the models of an optimizer are known.

        Args:
            optimizer: the optimizer.
            has_run: they have run by now. If no call of them was seen, they are run by a compiled function, which has
                taken our hook for a part of them: if it went away, they would be compiled again.
        """
        self._unsettled.discard(optimizer)
        self._settled.add(optimizer)
        if not self._knows(optimizer):
            self._parents.look_around()
            self._traced |= self._add([]) and has_run

    def discovery_failed(self, about: object, error: Exception) -> None:
        self._left_out(about, error)

    def _look_again(self) -> None:
        self._steps = 0
        self._discovery.arm()

    def _add(self, models: list[nn.Module], called: nn.Module | None = None) -> bool:
        """Add these models, and those of all other parameters that are trained; returns whether there were any."""
        known = self._known_parameters().union(id(each) for model in models for each in parameters_of(model))
        trained = self._parents.find_trained(known)
        parts = IdentitySet((*self._known, *(part for model in trained for part in modules_of(model))))
        if called is not None and _is_slice(called, parts):
            models = [model for model in models if model is not called]
            called = children_of(called)[0]  # it runs next, and at each later call
        models += trained
        new = [model for model in models if not all(each in self._known for each in modules_of(model))]
        del new[LIMITS.models - self._count :]
        for model in new:
            self._note(list(modules_of(model)), called)
        self._count += sum(model not in self._models for model in new)
        self._models.update(new)
        self._steps = 0
        if new:
            self._found(new, called)
        if self._count >= LIMITS.models:
            self.stop()
            self._failed(RecordingError(f"Only the first {LIMITS.models} models of this process are recorded."))
        return bool(new)

    def _note(self, parts: list[nn.Module], called: nn.Module | None) -> None:
        self._known.update(parts)
        if not any(each is called for each in parts):
            self._uncalled.update(parts)

    def _knows(self, optimizer: Optimizer) -> bool:
        known = self._known_parameters()
        return all(id(parameter) in known for parameter in held_by(optimizer))

    def _known_parameters(self) -> set[int]:
        return {id(each) for module in self._known for each in own_parameters(module)}


# ---- which model a module belongs to ----


class ModuleParents:
    """The parents of every module: learnt as models are built, and from the live objects of the process.

    A copied or unpickled model never tells who its parents are: only looking at all objects finds them. What torch
    offers is asked past the modules' own classes, of which some have a ``children`` or ``parameters`` of their own.

    Args:
        earlier: modules and optimizers that were there before: none is trained unless an optimizer in use updates it.
    """

    def __init__(self, earlier: Iterable[nn.Module | Optimizer] = ()) -> None:
        self._earlier: IdentitySet[nn.Module | Optimizer] = IdentitySet(earlier)
        self._parents: IdentityDict[nn.Module, IdentitySet[nn.Module]] = IdentityDict()
        self._optimizers: IdentitySet[Optimizer] = IdentitySet()
        self._modules: IdentitySet[nn.Module] = IdentitySet()

    def learn(self, parent: nn.Module, child: nn.Module) -> None:
        """``child`` is a submodule of ``parent``."""
        self._parents.setdefault(child, IdentitySet()).add(parent)

    def use(self, optimizer: Optimizer) -> None:
        """An optimizer gets parameters, or updates: it is not over."""
        self._earlier.discard(optimizer)
        self._optimizers.add(optimizer)

    def look_around(self) -> None:
        """Learn from all live objects."""
        for thing in list_instances(Optimizer, nn.Module):
            if issubclass(type(thing), Optimizer):
                if thing not in self._earlier:
                    self._optimizers.add(thing)
            elif is_complete(thing):
                self._modules.add(thing)
                for child in children_of(thing):
                    self.learn(thing, child)

    @property
    def has_optimizers(self) -> bool:
        """True if any optimizer has been seen."""
        return bool(len(self._optimizers))

    def find_model(self, module: nn.Module) -> nn.Module:
        """The model that a module is a part of, without what wraps it for distribution.

        Of several models that share the module it is the one with most of the parameters that optimizers update; of
        several such, the smallest.
        """
        tops = list(self._find_tops(module)) or [module]
        if len(tops) > 1:
            trained = self._trained_parameters()
            tops.sort(key=lambda top: _fitness(top, trained))
        return unwrap(tops[0])

    def is_trained(self, model: nn.Module) -> bool:
        """Return whether an optimizer holds a parameter of a model."""
        return not self._trained_parameters().isdisjoint(map(id, parameters_of(model)))

    def find_trained(self, known: set[int]) -> list[nn.Module]:
        """The models that own what is trained: what optimizers update, or, without any, what requires grad.

        Args:
            known: identities of parameters whose models need not be found. A module that has none but such is
                passed over: scripting a model, say, leaves a second one with the same parameters.
        """
        known = set(known)
        trained = self._trained_parameters()
        found: dict[int, nn.Module] = {}
        for module in self._modules:
            own = own_parameters(module)
            is_alive = module not in self._earlier
            if any(id(p) not in known and (id(p) in trained if trained else p.requires_grad and is_alive) for p in own):
                model = self.find_model(module)
                found[id(model)] = model
                known.update(map(id, parameters_of(model)))
        return list(found.values())

    def _trained_parameters(self) -> set[int]:
        return {id(parameter) for optimizer in self._optimizers for parameter in held_by(optimizer)}

    def _find_tops(self, module: nn.Module) -> Iterator[nn.Module]:
        seen = {id(module)}
        waiting = [module]
        while waiting:
            current = waiting.pop()
            parents = [parent for parent in self._parents.get(current, ()) if _has_child(parent, current)]
            if not parents:
                yield current
            waiting.extend(parent for parent in parents if id(parent) not in seen)
            seen.update(map(id, parents))


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside what wraps it for distribution. A DataParallel on several devices runs copies, not the model."""
    inner = getattr(module, "module", None) if type(module).__name__ in _WRAPPERS else None
    if isinstance(inner, nn.Module) and len(getattr(module, "device_ids", None) or ()) < 2:
        return unwrap(inner)
    return module


def _is_slice(module: nn.Module, parts: Collection[nn.Module]) -> bool:
    """Return whether it is ``net[:2]``, which is made anew for each call, and whose parts have names in their model."""
    children = children_of(module) if type(module) is nn.Sequential else []
    return bool(children) and all(child in parts for child in children)


def _makes_parameter() -> bool:
    """Return whether a call computes a parameter of another module, which may not have its place in a model yet."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != parametrize.__file__:
        frame = frame.f_back
    return frame is not None


def _has_child(parent: nn.Module, child: nn.Module) -> bool:
    """Return whether a module is still a child of this parent."""
    return any(module is child for module in children_of(parent))


def _fitness(top: nn.Module, trained: set[int]) -> tuple[int, int]:
    own = set(map(id, parameters_of(top)))
    return -len(own & trained), len(own)


# ---- names ----


def choose_names(models: Sequence[nn.Module], taken: Collection[str] = ()) -> dict[str, nn.Module]:
    """A name for each model: none for a single one, else the variable or attribute that holds it, else its class.

    One that is frozen has a name in any case: what is trained is another, or is to come.

    The variables are those of the code that runs now, from the outermost frame inwards, so that ``generator`` of the
    main program comes before the ``model`` of a function that trains any model.

    Args:
        models: models that have no name yet.
        taken: names that others have.
    """
    if len(models) == 1 and not taken and any(each.requires_grad for each in parameters_of(models[0])):
        return {"": models[0]}
    variables = _name_by_variables(models)
    named: dict[str, nn.Module] = {}
    for model in models:
        wish = variables.get(id(model)) or _name_by_class(model)
        named[_make_unique(wish, {*taken, *named})] = model
    return named


def _name_by_variables(models: Sequence[nn.Module]) -> dict[int, str]:
    wanted = {id(model) for model in models}
    names: dict[int, str] = {}
    for name, value in _variables():
        if isinstance(value, nn.Module) and id(unwrap(value)) in wanted:
            names.setdefault(id(unwrap(value)), name)
    return names


def _variables() -> Iterator[tuple[str, object]]:
    """Variables of all frames, the outermost first, and the attributes of each ``self`` (a trainer's models)."""
    for frame in reversed(list(_frames())):
        local = read_locals(frame)
        owner = local.get("self")
        yield from ((name, value) for name, value in local.items() if name != "self")
        if owner is not None and not isinstance(owner, nn.Module):
            yield from getattr(owner, "__dict__", {}).items()


def _frames() -> Iterator[FrameType]:
    """The frames of the program, from the inside; without those of torch and of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_OF_PROGRAM):
            yield frame
        frame = frame.f_back


def _name_by_class(model: nn.Module) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(model).__name__).lower()


def _make_unique(wish: str, taken: Collection[str]) -> str:
    name, number = wish, 1
    while name in taken:
        number += 1
        name = f"{wish}_{number}"
    return name
