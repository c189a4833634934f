"""All sources of facts of one recording, told together of what happens."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import takewhile
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from retrograd.core.history.fact import NOW, Fact, JsonObject, tell_many
from retrograd.core.history.sink import EventKind, Moment
from retrograd.core.hooks.engine import count_function_modes, is_abstract, without_functions
from retrograd.core.hooks.names import ModelNames, walk_parameters, walk_paths
from retrograd.core.hooks.optimizer import OptimizerNames, optimizer_listeners
from retrograd.core.limits import LIMITS
from retrograd.core.recording.deliveries import Deliveries
from retrograd.core.recording.fact_source import FactHost, FactSource, MakeSource, T, is_look


class FactTaker(Protocol):
    """Interface of the recorder."""

    def note(
        self, kind: EventKind, name: str = "", *, value: float = ..., text: str = "", moment: Moment | None = None
    ) -> None:
        """An event."""

    def fault(self, site: str, error: Exception) -> None:
        """An error of ours; training goes on."""

    @property
    def fact_step(self) -> int:
        """The step that it is now."""

    @property
    def is_fact_recorded(self) -> bool:
        """True if that step is recorded."""

    @property
    def fact_moment(self) -> Moment:
        """Current step, micro-batch and phase."""


_OF_STEPS = frozenset(
    {"forward_begins", "forward_ends", "backward_begins", "backward_ends", "update_begins", "update_ends"}
)
"""What sources that rest are not told of."""


class Facts:
    """The sources, each told of what happens.

    Args:
        taker: the recorder; held weakly.
        sources: what makes them.
        deliveries: bring numbers from devices.

    Attributes:
        models: the recorded models by name, and the paths of their modules.
        optimizers: their names.
        deliveries: bring numbers from devices.
    """

    def __init__(self, taker: FactTaker, sources: Sequence[MakeSource], deliveries: Deliveries) -> None:
        self._taker = weakref.ref(taker)
        self.deliveries = deliveries
        self.models = ModelNames()
        self.optimizers = OptimizerNames()
        self._shared: dict[Callable[[FactHost], Any], Any] = {}
        made = [make(self) for make in sources]
        self._sources = [each for each in made if type(each) not in {other.replaces for other in made}]
        self._parameters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._telling = threading.RLock()
        self._listeners: tuple[dict[str, list[MethodType]], ...] = ({}, {})
        self._is_recorded = self._are_resting = False
        self._seen_step = -1
        self._recorded = -1
        self._may_look = False

    # ---- what a source asks ----

    def note_fact(self, fact: Fact) -> None:
        """Keep a fact, of now where it does not say when."""
        taker = self._taker()
        if taker is not None:
            moment = taker.fact_moment if fact.moment is NOW else fact.moment
            taker.note(fact.kind, fact.name, value=fact.value, text=fact.text, moment=moment)

    def note_many(
        self, kind: type[Fact], name: str, same: JsonObject, each: Sequence[str], rows: Sequence[str], moment: Moment
    ) -> None:
        """Keep several facts as one event, see :func:`retrograd.core.history.fact.tell_many`."""
        taker = self._taker()
        if taker is not None and rows:
            taker.note(kind.kind, name, value=len(rows), text=tell_many(same, each, rows), moment=moment)

    def fault(self, site: str, error: Exception) -> None:
        """An error of ours."""
        taker = self._taker()
        if taker is not None:
            taker.fault(site, error)

    @property
    def step(self) -> int:
        """The step that events of now belong to."""
        taker = self._taker()
        return -1 if taker is None else taker.fact_step

    @property
    def is_recorded(self) -> bool:
        """True if this step is recorded."""
        taker = self._taker()
        return taker is not None and taker.is_fact_recorded

    @property
    def is_look(self) -> bool:
        """True if this step is one of the few at which sources may run expensive checks."""
        return self._may_look and self.is_recorded

    @property
    def now(self) -> Moment:
        """The moment of a fact that is seen now."""
        taker = self._taker()
        return NOW if taker is None else taker.fact_moment

    @property
    def recorded(self) -> int:
        """Number of steps that were recorded before this one."""
        return self._recorded

    def tell_operations(self, notes: Any) -> None:
        """Notify all sources of the operations that stand between a forward and its pass."""
        self._tell("operations_noted", notes)

    def share(self, make: Callable[[FactHost], T]) -> T:
        """What ``make`` has made for the first source that asked."""
        if make not in self._shared:
            self._shared[make] = make(self)
        made: T = self._shared[make]
        return made

    def name_parameter(self, tensor: torch.Tensor) -> str | None:
        """The name of a parameter of a recorded model."""
        name = self._parameters.get(tensor)
        return name if name is None else str(name)

    # ---- what happens ----

    def begin(self) -> None:
        """Recording begins."""
        optimizer_listeners.add(self)
        self._tell("begin")

    def model_added(self, name: str, model: nn.Module) -> None:
        """A model is recorded from now on."""
        self.models.add(name, model)
        self.name_parameters(name, model)
        self._tell("model_added", name, model)

    def name_parameters(self, name: str, model: nn.Module) -> None:
        """Name the parameters of a model that have no name yet."""
        for site, parameter in walk_parameters([(name, model)]):
            self._parameters.setdefault(parameter, site)

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """A recorded model is called by the program itself."""
        if is_abstract():  # tensors have no values of their own
            return
        taker = self._taker()
        is_recorded = taker is not None and taker.is_fact_recorded
        self._are_resting = not (is_recorded or self._is_recorded)
        self._is_recorded = is_recorded
        if taker is not None and is_recorded and taker.fact_step != self._seen_step:
            self._seen_step = taker.fact_step
            self._recorded += 1
            self._may_look = is_look(self._recorded)
        self._tell("forward_begins", self._unwrap(model), arguments)

    def forward_ends(self, model: nn.Module, output: Any, failed: bool) -> None:
        """A forward of a recorded model has ended."""
        if self._find_listeners("forward_ends") and not is_abstract():
            self._tell("forward_ends", self._unwrap(model), output, failed)

    def backward_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        """A backward pass is about to run."""
        if self._find_listeners("backward_begins") and not is_abstract():
            self._tell("backward_begins", roots)

    def backward_ends(self, failed: bool) -> None:
        """A backward pass has run."""
        if self._find_listeners("backward_ends") and not is_abstract():
            self._tell("backward_ends", failed)

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update."""
        self._tell("update_begins", optimizer)

    def update_ends(self, optimizer: Optimizer, found_inf: torch.Tensor | None) -> None:
        """An optimizer has updated."""
        self._tell("update_ends", optimizer)

    def update_skipped(self, optimizer: Optimizer) -> None:
        """Loss scaling has skipped its update."""
        self._tell("update_ends", optimizer)

    def loss_scaled(self, losses: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
        """Do nothing: sources do not need it."""

    def drain(self) -> None:
        """A step is over."""
        self._tell("drain")

    def end(self) -> None:
        """Recording ends."""
        optimizer_listeners.remove(self)
        self._tell("drain", patience=LIMITS.end_seconds)
        self.deliveries.deliver(wait=True)
        self._tell("end", patience=LIMITS.end_seconds)
        self.deliveries.deliver(wait=True)
        self._sources.clear()  # they refer to this object, and it to them
        self._shared.clear()
        for listeners in self._listeners:
            listeners.clear()

    def _unwrap(self, model: nn.Module) -> nn.Module:
        """The module of a recorded model that a wrapper of it runs (DDP, torch.compile)."""
        if self.models.path_of(model) is not None:
            return model
        wrapped = (module for _, module in takewhile(lambda found: not found[0], walk_paths("", model)))
        return next((module for module in wrapped if self.models.path_of(module) is not None), model)

    def _find_listeners(self, what: str) -> list[MethodType]:
        """Find the methods of sources that do something then."""
        listeners = self._listeners[self._are_resting]
        found = listeners.get(what)
        if found is None:
            is_quiet = self._are_resting and what in _OF_STEPS
            found = listeners[what] = [
                getattr(source, what)
                for source in self._sources
                if getattr(type(source), what) is not getattr(FactSource, what) and not (is_quiet and source.rests)
            ]
        return found

    def _tell(self, what: str, *about: Any, patience: float = 0.0) -> None:
        if not self._telling.acquire(timeout=patience):  # another thread is here, and in a fork is so for good
            return
        try:
            if count_function_modes():  # each attribute would pass through them
                with without_functions():
                    self._tell_each(what, about)
            else:
                self._tell_each(what, about)
        finally:
            self._telling.release()

    def _tell_each(self, what: str, about: tuple[Any, ...]) -> None:
        for tell in self._find_listeners(what):
            try:
                tell(*about)
            except Exception as error:
                self.fault(f"{type(tell.__self__).__name__}.{what}", error)
