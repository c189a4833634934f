"""Both exact watches of a program, on one look at what it does."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from retrograd.facts.nonfinite_watch import NonFiniteWatch
from retrograd.facts.overwrite_watch import OverwriteWatch
from retrograd.facts.source import FactHost, FactSource
from retrograd.hooks.program_watch import ProgramWatch


class ExactWatch(FactSource):
    """Where the first number is made that is not finite, and what was overwritten: at every step."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        watch = ProgramWatch(host.name_module, lambda error: host.fault("exact", error))
        self._parts = NonFiniteWatch(host, watch), OverwriteWatch(host, watch)

    def begin(self) -> None:
        for part in self._parts:
            part.begin()

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        for part in self._parts:
            part.forward_begins(model, arguments)

    def backward_begins(self, roots: tuple[Tensor, ...]) -> None:
        for part in self._parts:
            part.backward_begins(roots)

    def update_begins(self, optimizer: Optimizer) -> None:
        for part in self._parts:
            part.update_begins(optimizer)

    def update_ends(self, optimizer: Optimizer) -> None:
        for part in self._parts:
            part.update_ends(optimizer)

    def end(self) -> None:
        for part in self._parts:
            part.end()
