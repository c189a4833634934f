"""Base class of sources of facts: the recorder tells a source of each event, and the source notes facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from retrograd.core.history.fact import Fact, JsonObject
from retrograd.core.history.sink import Moment
from retrograd.core.hooks.names import ModelNames
from retrograd.core.hooks.optimizer import OptimizerNames
from retrograd.core.recording.deliveries import Deliveries

T = TypeVar("T")


class FactHost(Protocol):
    """The recorder, as a source sees it."""

    def note_fact(self, fact: Fact) -> None:
        """Keep a fact; its moment is filled in."""

    def note_many(
        self, kind: type[Fact], name: str, same: JsonObject, each: Sequence[str], rows: Sequence[str], moment: Moment
    ) -> None:
        """Keep several facts as one event, see :func:`retrograd.core.history.fact.tell_many`."""

    def fault(self, site: str, error: Exception) -> None:
        """An error of ours; training goes on."""

    @property
    def models(self) -> ModelNames:
        """The recorded models by name, and the paths of their modules."""

    @property
    def optimizers(self) -> OptimizerNames:
        """The names of optimizers, in facts and in sites."""

    @property
    def deliveries(self) -> Deliveries:
        """What brings numbers from devices."""

    @property
    def step(self) -> int:
        """The step that events of now belong to; after an update, the next one."""

    @property
    def is_recorded(self) -> bool:
        """True if this step is recorded."""

    @property
    def is_look(self) -> bool:
        """True if this step is one of the few at which sources may run expensive checks."""

    @property
    def now(self) -> Moment:
        """The moment of a fact that is seen now."""

    @property
    def recorded(self) -> int:
        """Number of steps that were recorded before this one."""

    def tell_operations(self, notes: Any) -> None:
        """Notify all sources of the operations that stand between a forward and its pass."""

    def share(self, make: Callable[[FactHost], T]) -> T:
        """What ``make`` has made for the first source that asked: one for all of them."""

    def name_parameter(self, tensor: torch.Tensor) -> str | None:
        """The site of a parameter; None where it belongs to no recorded model."""


class FactSource:
    """Does nothing; a source overrides what it needs. What it raises is counted as a fault of ours.

    Attributes:
        rests: nothing happens for it while steps are not recorded. It is still told of the first of several such steps,
            so that it can put away what it has begun, and of all that is no call, pass or update.
        replaces: a source that is left out beside this one, which knows the same exactly.
    """

    rests = False
    replaces: type[FactSource] | None = None

    def __init__(self, host: FactHost) -> None:
        self.host = host

    def begin(self) -> None:
        """Recording begins."""

    def model_added(self, name: str, model: nn.Module) -> None:
        """A model is recorded from now on."""

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """A recorded model is called by the program itself, with ``(args, kwargs)``."""

    def forward_ends(self, model: nn.Module, output: Any, failed: bool) -> None:
        """A forward of a recorded model has ended."""

    def backward_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        """A backward pass is about to run."""

    def backward_ends(self, failed: bool) -> None:
        """A backward pass has run."""

    def operations_noted(self, notes: Any) -> None:
        """Operations between a forward and its pass are known: told at looks, where they are not as before."""

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update."""

    def update_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has updated, or was skipped."""

    def drain(self) -> None:
        """A step is over: send for the numbers of what was held back until now, and note it when they have come."""

    def end(self) -> None:
        """Recording ends: leave nothing behind."""


MakeSource = Callable[[FactHost], FactSource]
"""Maker of a source: its class, or a function that gives it more than the host."""


# ---- when to look ----

EVERY = 128
"""Between looks, once a run has settled."""


def is_look(recorded: int) -> bool:
    """Return whether the step before which so many were recorded is looked at: 0, 1, 2, powers of two, every 128th."""
    return recorded % EVERY == 0 or recorded & (recorded - 1) == 0
