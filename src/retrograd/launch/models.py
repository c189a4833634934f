"""The models that a program trains: found while it runs, and named as the program names them."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from retrograd.errors import RecordingError
from retrograd.hooks.discovery import ModelDiscovery
from retrograd.hooks.distributed import is_rehearsal
from retrograd.hooks.live_objects import list_instances
from retrograd.hooks.module import has_compiled_part

PATIENCE = 20
"""Steps without a new model after which the program is taken to have shown all it has."""

MOST_MODELS = 32
"""Models recorded in one process: who makes more of them makes a new one every round."""

_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "_FabricModule"}

_KEPT_BY_FRAME_ALONE = 3
"""References to such a dict where nobody but the frame, and the function that counts them, has it."""

_OURS = f"{Path(__file__).parents[1]}/"


class Search:
    """Looks at forward calls until it knows all models, and again when there are new parameters.

    A model is found when one of its modules is called with grad mode on, just before that call. With it come all
    models that have parameters in an optimizer by then. What has no parameter (a loss) is left alone.

    Args:
        found: called with models that are new, or have new modules, and with the module that is about to run; None
            for models that have run before.
        failed: called when the search ends before its time.
    """

    def __init__(
        self, found: Callable[[list[nn.Module], nn.Module | None], None], failed: Callable[[Exception], None]
    ) -> None:
        self._found = found
        self._failed = failed
        self._family = Family()
        self._models: WeakSet[nn.Module] = WeakSet()
        self._known: WeakSet[nn.Module] = WeakSet()
        self._settled: WeakSet[Optimizer] = WeakSet()
        self._count = 0
        self._steps = 0
        self._traced = False
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
        self._family.learn(parent, child)

    def parameter_made(self, module: nn.Module) -> None:
        self._look_again()

    def module_called(self, module: nn.Module) -> None:
        if module in self._known or is_rehearsal():
            return
        if _is_slice(module, self._known):
            self._known.add(module)
            return
        with self._lock:
            if next(nn.Module.parameters(self._family.find_model(module)), None) is not None:
                self._family.look_around()
                self._add([self._family.find_model(module)], module)
                if any(has_compiled_part(model) for model in self._models):
                    self._discovery.disarm()  # before torch.compile takes our hook for a part of the model
            self._known.update(nn.Module.modules(module))

    def compiled_function_called(self) -> None:
        """A compiled function runs: the models that it may call, whose hooks it must find, are all that are trained."""
        with self._lock:
            self._family.look_around()
            if self._family.has_optimizers and self._add([]):
                self._discovery.disarm()  # before torch.compile takes our hook for a part of the function

    def has_optimizers(self) -> bool:
        """Tell whether the program has made an optimizer."""
        with self._lock:
            self._family.look_around()
            return self._family.has_optimizers

    @property
    def blind_call(self) -> str:
        """Line of the first call of a module with gradients switched off; empty where there was none."""
        return self._discovery.blind_call

    def pass_begins(self) -> None:
        """A backward pass begins, and no model has been found: are there any that optimizers update?"""
        with self._lock:
            self._family.look_around()
            if self._family.has_optimizers:  # else any model of the process would be taken for one that is trained
                self._traced |= self._add([])

    def update_begins(self, optimizer: Optimizer) -> None:
        if optimizer not in self._settled:
            with self._lock:
                self._settle(optimizer)
        self.step_made()

    def _settle(self, optimizer: Optimizer) -> None:
        """Make sure that the models of an optimizer are known."""
        if self._knows(optimizer):
            self._settled.add(optimizer)
        elif not self._discovery.armed:
            self._look_again()
        elif any(parameter.grad is not None for parameter in parameters_of(optimizer)):
            self._settled.add(optimizer)
            self._family.look_around()
            # Models that train and were not seen are run by a compiled function, which has taken our hook for a part
            # of them: if it went away, they would be compiled again.
            self._traced |= self._add([])

    def discovery_failed(self, error: Exception) -> None:
        self._failed(error)

    def _look_again(self) -> None:
        self._steps = 0
        self._discovery.arm()

    def _add(self, models: list[nn.Module], called: nn.Module | None = None) -> bool:
        """Add these models, and those of all other parameters that are trained; returns whether there were any."""
        known = self._known_parameters().union(id(each) for model in models for each in nn.Module.parameters(model))
        trained = self._family.find_trained(known)
        parts = {*self._known, *(part for model in trained for part in nn.Module.modules(model))}
        if called is not None and _is_slice(called, parts):
            models = [model for model in models if model is not called]
            called = next(iter(nn.Module.children(called)))  # it runs next, and at each later call
        models += trained
        new = [model for model in models if not self._known.issuperset(nn.Module.modules(model))]
        del new[MOST_MODELS - self._count :]
        for model in new:
            self._known.update(nn.Module.modules(model))
        self._count += sum(model not in self._models for model in new)
        self._models.update(new)
        self._steps = 0
        if new:
            self._found(new, called)
        if self._count >= MOST_MODELS:
            self.stop()
            self._failed(RecordingError(f"Only the first {MOST_MODELS} models of this process are recorded."))
        return bool(new)

    def _knows(self, optimizer: Optimizer) -> bool:
        known = self._known_parameters()
        return all(id(parameter) in known for parameter in parameters_of(optimizer))

    def _known_parameters(self) -> set[int]:
        return {id(each) for module in list(self._known) for each in nn.Module.parameters(module, recurse=False)}


# ---- which model a module belongs to ----


class Family:
    """The parents of every module: learnt as models are built, and from the live objects of the process.

    A copied or unpickled model never tells who its parents are: only looking at all objects finds them. What torch
    offers is asked past the modules' own classes, of which some have a ``children`` or ``parameters`` of their own.
    """

    def __init__(self) -> None:
        self._parents: WeakKeyDictionary[nn.Module, WeakSet[nn.Module]] = WeakKeyDictionary()
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._modules: WeakSet[nn.Module] = WeakSet()

    def learn(self, parent: nn.Module, child: nn.Module) -> None:
        """``child`` is a submodule of ``parent``."""
        self._parents.setdefault(child, WeakSet()).add(parent)

    def look_around(self) -> None:
        """Learn from all live objects."""
        for thing in list_instances(Optimizer, nn.Module):
            if issubclass(type(thing), Optimizer):
                self._optimizers.add(thing)
            elif "_modules" in thing.__dict__:  # else it is still being made
                self._modules.add(thing)
                for child in nn.Module.children(thing):
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

    def find_trained(self, known: set[int]) -> list[nn.Module]:
        """The models that own what is trained: what optimizers update, or, without any, what requires grad.

        Args:
            known: identities of parameters whose models need not be found. A module that has none but such is
                passed over: scripting a model, say, leaves a second one with the same parameters.
        """
        known = set(known)
        trained = self._trained_parameters()
        found: dict[nn.Module, None] = {}
        for module in list(self._modules):
            own = nn.Module.parameters(module, recurse=False)
            if any(id(p) not in known and (id(p) in trained if trained else p.requires_grad) for p in own):
                model = self.find_model(module)
                found[model] = None
                known.update(map(id, nn.Module.parameters(model)))
        return list(found)

    def _trained_parameters(self) -> set[int]:
        return {id(parameter) for optimizer in list(self._optimizers) for parameter in parameters_of(optimizer)}

    def _find_tops(self, module: nn.Module) -> Iterator[nn.Module]:
        seen = {module}
        waiting = [module]
        while waiting:
            current = waiting.pop()
            parents = [parent for parent in list(self._parents.get(current, ())) if _has_child(parent, current)]
            if not parents:
                yield current
            waiting.extend(parent for parent in parents if parent not in seen)
            seen.update(parents)


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside what wraps it for distribution. A DataParallel on several devices runs copies, not the model."""
    inner = getattr(module, "module", None) if type(module).__name__ in _WRAPPERS else None
    if isinstance(inner, nn.Module) and len(getattr(module, "device_ids", None) or ()) < 2:
        return unwrap(inner)
    return module


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that an optimizer updates."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def _is_slice(module: nn.Module, parts: Collection[nn.Module]) -> bool:
    """Tell whether it is ``net[:2]``, which is made anew for each call, and whose parts have names in their model."""
    children = list(nn.Module.children(module)) if type(module) is nn.Sequential else []
    return bool(children) and all(child in parts for child in children)


def _has_child(parent: nn.Module, child: nn.Module) -> bool:
    """Tell whether a module is still a child of this parent."""
    return any(module is child for module in nn.Module.children(parent))


def _fitness(top: nn.Module, trained: set[int]) -> tuple[int, int]:
    own = set(map(id, nn.Module.parameters(top)))
    return -len(own & trained), len(own)


# ---- names ----


def name_models(models: Sequence[nn.Module], taken: Collection[str] = ()) -> dict[str, nn.Module]:
    """A name for each model: none for a single one, else the variable or attribute that holds it, else its class.

    The variables are those of the code that runs now, from the outermost frame inwards, so that ``generator`` of the
    main program comes before the ``model`` of a function that trains any model.

    Args:
        models: models that have no name yet.
        taken: names that others have.
    """
    if len(models) == 1 and not taken:
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
    """The frames of the program, from the inside; without those of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OURS):
            yield frame
        frame = frame.f_back


def read_locals(frame: FrameType) -> dict[str, object]:
    """The variables of a frame; it holds no more of them than before.

    Up to Python 3.12 a function's frame that is asked for its variables keeps a dict of them until it ends, and with
    it models that the program drops meanwhile. That dict is emptied, unless the program has got it from ``locals()``.
    """
    seen = frame.f_locals
    local = dict(seen)
    is_of_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_of_function and type(seen) is dict and sys.getrefcount(seen) <= _KEPT_BY_FRAME_ALONE:
        seen.clear()
    return local


def _name_by_class(model: nn.Module) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(model).__name__).lower()


def _make_unique(wish: str, taken: Collection[str]) -> str:
    name, number = wish, 1
    while name in taken:
        number += 1
        name = f"{wish}_{number}"
    return name
