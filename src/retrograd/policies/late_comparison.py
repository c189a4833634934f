"""Whether what was computed again on a device is the same, asked without waiting for the device."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from retrograd.policies.overwriting import Place
from retrograd.policies.samples import are_apart, tolerance_of

_MOST_NOTED = 64
"""Pairs that are compared at once, by six kernels."""
Key = tuple[torch.cuda.Stream, float]


class _Pair(NamedTuple):
    first: Tensor
    second: Tensor
    place: Place


class _Question(NamedTuple):
    answered: torch.cuda.Event
    are_apart: Tensor
    places: list[Place]


class LateComparison:
    """Pairs of samples, and the answers that are under way to the host."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: dict[Key, list[_Pair]] = {}
        self._asked: list[_Question] = []

    def note(self, first: Tensor, second: Tensor, dtype: torch.dtype, place: Place) -> Place | None:
        """Compare two samples some time.

        Returns:
            A place of which earlier samples were not the same, if that is known by now.
        """
        key = torch.cuda.current_stream(second.device), tolerance_of(dtype)
        with self._lock:
            pairs = self._noted.setdefault(key, [])
            pairs.append(_Pair(first, second, place))
            if len(pairs) >= _MOST_NOTED:
                self._asked.append(_ask(key, self._noted.pop(key)))
            return self._read(is_end=False)

    def end(self) -> Place | None:
        """Wait for the device; a place of which samples were not the same."""
        with self._lock:
            while self._noted:
                self._asked.append(_ask(*self._noted.popitem()))
            return self._read(is_end=True)

    def _read(self, *, is_end: bool) -> Place | None:
        while self._asked and (is_end or self._asked[0].answered.query()):
            question = self._asked.pop(0)
            question.answered.synchronize()
            for place, is_apart in zip(question.places, question.are_apart.tolist(), strict=True):
                if is_apart:
                    return place
        return None


def _ask(key: Key, pairs: list[_Pair]) -> _Question:
    stream, tolerance = key
    with torch.cuda.stream(stream):  # the samples were taken on it
        first, second = torch.stack([pair.first for pair in pairs]), torch.stack([pair.second for pair in pairs])
        read = _allocate(len(pairs))
        read.copy_(are_apart(first, second, tolerance), non_blocking=True)
        return _Question(stream.record_event(), read, [pair.place for pair in pairs])


def _allocate(count: int) -> Tensor:
    """Memory that a device copies to while the program goes on."""
    return torch.empty(count, dtype=torch.bool, pin_memory=True)
