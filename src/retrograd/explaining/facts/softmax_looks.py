"""How certain softmax functions are, at looks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from retrograd.core.history.facts import Operation, Softmax
from retrograd.core.hooks.dispatch import carry_out_unseen, without_graph
from retrograd.core.hooks.torch_calls import TorchCall
from retrograd.core.recording.deliveries import Arrays
from retrograd.core.recording.fact_source import FactHost
from retrograd.explaining.facts.value_look import ValueLook, is_readable

_MOST = 256
"""Calls of a look that are seen."""


class SoftmaxLooks(ValueLook):
    """Keeps Σp² and Σp of what a softmax in a module's forward has made."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._held: list[tuple[Softmax, Tensor]] = []

    def see(self, number: int, noted: Operation, call: TorchCall) -> None:
        """Keep the sums of a softmax."""
        if noted.name != "softmax" or not noted.module or len(self._held) >= _MOST:
            return
        result = call.made[0]
        if is_readable(result) and result.ndim > 1:
            entries, now = _count_entries(noted.arguments, result), self.host.now
            fact = Softmax(name=noted.module, line=noted.line, value=0.0, entries=entries, moment=now)
            self.is_wanted = True
            self._held.append((fact, _add_up(without_graph(result))))

    def drain(self) -> None:
        """Record one fact for each line."""
        held, self._held = self._held, []
        sums: dict[Softmax, Tensor] = {}
        for fact, pair in held:
            sums[fact] = sums[fact] + pair if fact in sums else pair
        self.host.deliveries.add(list(sums.values()), partial(self._note, list(sums)))

    def _note(self, facts: Sequence[Softmax], arrays: Arrays) -> None:
        for fact, (squares, total) in zip(facts, arrays, strict=True):
            if total > 0:
                self.host.note_fact(replace(fact, value=float(squares / total)))


def _count_entries(arguments: str, result: Tensor) -> int:
    """Count the numbers that add up to one: those along the dimension that it was called with, else the last one."""
    found = re.search(r"\bdim=(-?\d+)", arguments)
    return result.shape[int(found[1]) if found else -1]


def _add_up(result: Tensor) -> Tensor:
    def add_up() -> Tensor:
        numbers = result.float()
        return torch.stack([numbers.square().sum(), numbers.sum()]).double()

    return carry_out_unseen(add_up)
