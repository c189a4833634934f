"""Finds the models that a program trains, while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakSet

from torch import nn
from torch.optim.optimizer import Optimizer

from retrograd.errors import RecordingError
from retrograd.hooks.discovery import ModelDiscovery, is_compiled
from retrograd.launch.family import Family, parameters_of

PATIENCE = 20
"""Steps without a new model after which the program is taken to have shown all it has."""

MOST_MODELS = 32
"""Models recorded in one process: who makes more of them makes a new one every round."""


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
        if module in self._known:
            return
        with self._lock:
            if next(nn.Module.parameters(self._family.find_model(module)), None) is not None:
                self._family.look_around()
                self._add([self._family.find_model(module)], module)
                if any(is_compiled(model) for model in self._models):
                    self._discovery.disarm()  # before torch.compile takes our hook for a part of the model
            self._known.update(nn.Module.modules(module))

    def has_optimizers(self) -> bool:
        """Whether the program has made an optimizer."""
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
        models += self._family.find_trained(known)
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
