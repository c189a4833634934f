"""How sure the softmax functions of a model are, at looks. What is reduced stays on its device until it may be read."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from retrograd.facts.source import FactHost
from retrograd.history.facts import Softmax
from retrograd.hooks.dispatch import carry_out_unseen, without_graph
from retrograd.hooks.engine import grad_enabled, is_transformed
from retrograd.hooks.operation_notes import NotedOperation

_MOST = 256
"""Calls of a look that are seen."""


class SoftmaxLooks:
    """Is shown what operations make, and keeps Σp² and Σp of what a softmax in a module's forward has made."""

    def __init__(self, host: FactHost) -> None:
        self._host = host
        self._held: list[tuple[Softmax, Tensor]] = []
        self.are_there = False
        """Whether one has been seen."""

    def see(self, noted: NotedOperation, result: Tensor) -> None:
        """An operation has been called."""
        if noted.name == "softmax" and noted.module and len(self._held) < _MOST and _is_readable(result):
            entries, now = _count_entries(noted.arguments, result), self._host.now
            fact = Softmax(name=noted.module, line=noted.line, value=0.0, entries=entries, moment=now)
            self.are_there = True
            self._held.append((fact, _add_up(without_graph(result))))

    def drain(self) -> None:
        """Note one fact for each line."""
        held, self._held = self._held, []
        sums: dict[Softmax, Tensor] = {}
        for fact, pair in held:
            sums[fact] = sums[fact] + pair if fact in sums else pair
        for fact, pair in sums.items():
            squares, total = pair.tolist()
            if total > 0:
                self._host.note_fact(replace(fact, value=squares / total))


def _count_entries(arguments: str, result: Tensor) -> int:
    """How many numbers add up to one: those along the dimension that it was called with, else the last one."""
    found = re.search(r"\bdim=(-?\d+)", arguments)
    return result.shape[int(found[1]) if found else -1]


def _is_readable(result: Tensor) -> bool:
    is_plain = type(result) is Tensor and not is_transformed(result) and result.layout is torch.strided
    return is_plain and grad_enabled() and result.ndim > 1 and result.numel() > 0 and not result.is_meta


def _add_up(result: Tensor) -> Tensor:
    def add_up() -> Tensor:
        numbers = result.float()
        return torch.stack([numbers.square().sum(), numbers.sum()]).double()

    return carry_out_unseen(add_up)
