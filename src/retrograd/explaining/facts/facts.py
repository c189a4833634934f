"""All sources of facts of one recording, told together of what happens."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from itertools import takewhile
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from retrograd.core.history.fact import NOW, Fact, JsonObject, tell_many
from retrograd.core.history.sink import EventKind, Moment
from retrograd.core.hooks.engine import is_abstract
from retrograd.core.hooks.names import walk_parameters, walk_paths
from retrograd.core.hooks.optimizer import OptimizerNumbers, optimizer_listeners
from retrograd.core.hooks.program_watch import ProgramWatch
from retrograd.core.identities import IdentityDict
from retrograd.core.sites.site import ROOT
from retrograd.explaining.facts.calls import CallSource
from retrograd.explaining.facts.freed_graphs import FreedGraphs
from retrograd.explaining.facts.modes import ModeSource
from retrograd.explaining.facts.nonfinite_look import NonFiniteLook
from retrograd.explaining.facts.operation_notes import OperationNotes
from retrograd.explaining.facts.operations import ForwardOperations
from retrograd.explaining.facts.saved_pairs import SavedPairs
from retrograd.explaining.facts.second_derivatives import SecondDerivatives
from retrograd.explaining.facts.source import FactSource, MakeSource, is_look
from retrograd.explaining.facts.tensors import InputSource, StateSource
from retrograd.explaining.facts.units import UnitLooks

SOURCES: tuple[MakeSource, ...] = (
    CallSource, ModeSource, InputSource, StateSource, ForwardOperations, UnitLooks,
    NonFiniteLook, FreedGraphs, SavedPairs, SecondDerivatives,
)  # fmt: skip
"""Sources of every recording."""


class FactTaker(Protocol):
    """The recorder."""

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
        """Now."""


_PATIENCE = 5.0
"""Seconds for which the end of a recording waits for another thread, so that nothing is left behind."""

_OF_STEPS = frozenset(
    {"forward_begins", "forward_ends", "backward_begins", "backward_ends", "update_begins", "update_ends"}
)
"""What sources that rest are not told of."""


class Facts:
    """The sources, each told of what happens.

    Args:
        taker: the recorder; held weakly.
        sources: what makes them; those of every recording when left out.

    Attributes:
        optimizers: the numbers of optimizers.
    """

    def __init__(self, taker: FactTaker, sources: Sequence[MakeSource] = SOURCES) -> None:
        self._taker = weakref.ref(taker)
        self.optimizers = OptimizerNumbers()
        self._program_watch: ProgramWatch | None = None
        made = [make(self) for make in sources]
        self._sources = [each for each in made if type(each) not in {other.replaces for other in made}]
        self._parameters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._modules: IdentityDict[nn.Module, str] = IdentityDict()
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
        """True if this step is one of the few at which sources may look at what is dear."""
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

    def tell_operations(self, notes: OperationNotes) -> None:
        """Tell all sources which operations stand between a forward and its pass."""
        self._tell("operations_noted", notes)

    @property
    def program_watch(self) -> ProgramWatch:
        """Watches the program, for all sources that need that."""
        if self._program_watch is None:
            about = "overwritten tensors and non-finite numbers"
            self._program_watch = ProgramWatch(self.name_module, lambda error: self.fault(about, error))
        return self._program_watch

    def name_parameter(self, tensor: torch.Tensor) -> str | None:
        """The name of a parameter of a recorded model."""
        name = self._parameters.get(tensor)
        return name if name is None else str(name)

    def name_module(self, module: nn.Module) -> str | None:
        """The path of a module of a recorded model."""
        return self._modules.get(module)

    # ---- what happens ----

    def begin(self) -> None:
        """Recording begins."""
        optimizer_listeners.add(self)
        self._tell("begin")

    def model_added(self, name: str, model: nn.Module) -> None:
        """A model is recorded from now on."""
        for path, module in walk_paths(name, model):
            self._modules.setdefault(module, path or ROOT)
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
        """Tell nothing: sources do not need it."""

    def drain(self) -> None:
        """A device may be waited for."""
        self._tell("drain")

    def end(self) -> None:
        """Recording ends."""
        optimizer_listeners.remove(self)
        self._tell("drain", patience=_PATIENCE)
        self._tell("end", patience=_PATIENCE)
        self._sources.clear()  # they refer to this object, and it to them
        self._program_watch = None
        for listeners in self._listeners:
            listeners.clear()

    def _unwrap(self, model: nn.Module) -> nn.Module:
        """The module of a recorded model that a wrapper of it runs (DDP, torch.compile)."""
        if model in self._modules:
            return model
        wrapped = (module for _, module in takewhile(lambda found: not found[0], walk_paths("", model)))
        return next((module for module in wrapped if module in self._modules), model)

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
            for tell in self._find_listeners(what):
                try:
                    tell(*about)
                except Exception as error:
                    self.fault(f"{type(tell.__self__).__name__}.{what}", error)
        finally:
            self._telling.release()
