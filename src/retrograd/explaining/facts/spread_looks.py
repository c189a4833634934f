"""How far the samples of a batch are apart in what models return, at looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.history.data_facts import Spread
from retrograd.core.hooks.dispatch import carry_out_unseen, without_graph
from retrograd.core.hooks.nested import flatten
from retrograd.core.recording.deliveries import Arrays
from retrograd.core.recording.fact_source import FactSource
from retrograd.core.sites.site import ROOT, Site
from retrograd.explaining.facts.value_look import is_readable

_MOST = 2
"""Tensors of one call that are read."""

_ELEMENTS = 1 << 20
"""Elements that are read of each."""


class SpreadLooks(FactSource):
    """Reduces what each model returns from its first call with grad mode at a look."""

    rests = True

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self._step = -1
        self._seen: set[str] = set()
        self._given: dict[str, list[Tensor]] = {}
        self._held: list[tuple[Spread, Tensor]] = []

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """Hold what it is called with until it returns."""
        if not self.host.is_look:
            return
        if self.host.step != self._step:
            self._step = self.host.step
            self._seen.clear()
            self._given.clear()
        name = self.host.models.path_of(model) or ROOT
        if name not in self._seen:
            found = [tensor for _, tensor in flatten(arguments, ()) if _has_samples(tensor)]
            self._given[name] = [without_graph(each) for each in found[:_MOST]]

    def forward_ends(self, model: nn.Module, output: Any, failed: bool) -> None:
        """Reduce what it returns."""
        if not self._given:
            return
        name = self.host.models.path_of(model) or ROOT
        given = self._given.pop(name, None)
        if given is None or failed:
            return
        found = [(keys, each) for keys, each in flatten(output, ()) if _has_samples(each) and each.is_floating_point()]
        for keys, tensor in found[:_MOST]:
            self._seen.add(name)
            source = next((each for each in given if len(each) == len(tensor) and each.device == tensor.device), None)
            self._reduce(str(Site(name, ("output", *keys))), without_graph(tensor), source)

    def _reduce(self, site: str, tensor: Tensor, given: Tensor | None) -> None:
        def reduce() -> Tensor:
            return torch.stack([*_spread(tensor), *([] if given is None else _spread(given))])

        fact = Spread(name=site, samples=len(tensor), moment=self.host.now)
        self._held.append((fact, carry_out_unseen(reduce)))

    def drain(self) -> None:
        """Record what was seen."""
        held, self._held = self._held, []
        self.host.deliveries.add([numbers for _, numbers in held], partial(self._note, [fact for fact, _ in held]))

    def _note(self, facts: Sequence[Spread], arrays: Arrays) -> None:
        for fact, numbers in zip(facts, arrays, strict=True):
            value, size, *given = numbers.tolist()
            self.host.note_fact(replace(fact, value=value, size=size, given=given[0] if given else math.nan))

    def end(self) -> None:
        """Hold nothing."""
        self._given.clear()


def _has_samples(tensor: Any) -> bool:
    is_whole = isinstance(tensor, Tensor) and is_readable(tensor) and not tensor.is_quantized
    return is_whole and tensor.ndim > 0 and len(tensor) > 1


def _spread(tensor: Tensor) -> list[Tensor]:
    """Σ(x − x̄)² / Σx² with the mean over the first dimension, and the root mean square."""
    rows = tensor.reshape(len(tensor), -1)
    rows = rows[:, : max(1, _ELEMENTS // len(rows))].double()
    squares = rows.square().sum()
    return [(rows - rows.mean(0)).square().sum() / squares, (squares / rows.numel()).sqrt()]
