"""Whether the program's own hooks for saved tensors give back what they were given, at looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from retrograd.core.history.facts import Unpacked
from retrograd.core.hooks.saved import Pack, Unpack
from retrograd.core.hooks.torch_calls import describe_function
from retrograd.core.hooks.user_pairs import PairWatch
from retrograd.core.recording.deliveries import Arrays
from retrograd.core.recording.fact_source import FactHost, FactSource

_Place = tuple[str, str, str, str]


class SavedPairs(FactSource):
    """Records each pair of hooks whose ``unpack`` has given other data than its ``pack`` was given; once."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._watch = PairWatch(
            lambda: host.is_look, self._see, lambda error: host.fault("hooks on saved tensors", error)
        )
        self._waiting: list[tuple[Unpacked, torch.Tensor]] = []
        self._told: set[_Place] = set()

    def begin(self) -> None:
        """Watch pairs that are set from now on."""
        self._watch.begin()

    def _see(self, pack: Pack, unpack: Unpack, sizes: torch.Tensor, is_same_memory: bool) -> None:
        (first, pack_line), (second, line) = describe_function(pack), describe_function(unpack)
        if (first, pack_line, second, line) not in self._told:
            fact = Unpacked(
                pack=first, pack_line=pack_line, unpack=second, line=line, written=is_same_memory, moment=self.host.now
            )
            self._waiting.append((fact, sizes))

    def drain(self) -> None:
        """Read the differences, of which each tensor has one."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.host.deliveries.add(
                [sizes for _, sizes in waiting], partial(self._note, [fact for fact, _ in waiting])
            )

    def _note(self, facts: Sequence[Unpacked], arrays: Arrays) -> None:
        found: dict[_Place, list[tuple[Unpacked, float]]] = {}
        for fact, sizes in zip(facts, arrays, strict=True):
            apart, size = sizes.tolist()
            share = apart / size if size else float(apart > 0)
            found.setdefault((fact.pack, fact.pack_line, fact.unpack, fact.line), []).append((fact, share))
        for place, each in found.items():
            changed = [(fact, share) for fact, share in each if share > 0]
            if changed and place not in self._told:
                self._told.add(place)
                worst, share = max(changed, key=lambda each: (each[0].written, each[1]))
                self.host.note_fact(replace(worst, value=share, tensors=len(each), changed=len(changed)))

    def end(self) -> None:
        """Leave nothing behind."""
        self._watch.end()
