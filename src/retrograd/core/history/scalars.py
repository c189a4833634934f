"""Numbers of which a step has one: its loss, its rate, norms over all parameters, and what the user has logged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from retrograd.core.history.arrays import read_codes, read_numbers
from retrograd.core.history.events import Events
from retrograd.core.history.matrix import Curve

SCALAR = "scalar"
"""Kind of the events that hold a number of their step; ``name`` says of what."""

SCALAR_NAMES = frozenset({
    "eval_loss", "lr", "grad_norm", "grad_norm_clipped", "update_ratio", "step_time", "throughput", "memory", "scale",
    "epoch",
})  # fmt: skip
"""Those that a history has as attributes too, as far as they were recorded: ``history.lr``."""


class Scalars(Mapping[str, Curve]):
    """Series of one number a step, by name: ``loss`` first, then others in the order first recorded.

    Args:
        events: those of a record.
    """

    def __init__(self, events: Events) -> None:
        self._events = events

    def __getitem__(self, name: str) -> Curve:
        return self._curves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._curves)

    def __len__(self) -> int:
        return len(self._curves)

    def __repr__(self) -> str:
        return f"Scalars({', '.join(self)})"

    @cached_property
    def _curves(self) -> dict[str, Curve]:
        loss = self._events.loss
        return {**({"loss": loss} if len(loss.steps) else {}), **read_scalars(self._events)}


def read_scalars(events: Events) -> dict[str, Curve]:
    """The series of all scalar events, by name; of several numbers of one step the last."""
    code_of: dict[str, int] = {}
    steps, codes, values = [], [], []
    for piece in events.pieces(["step", "name", "value"], (SCALAR,)):
        steps.append(read_numbers(piece["step"]))
        codes.append(read_codes(piece["name"], code_of))
        values.append(read_numbers(piece["value"]))
    if not code_of:
        return {}
    step, code, value = np.concatenate(steps), np.concatenate(codes), np.concatenate(values)
    found = {}
    for name, number in code_of.items():
        mine = np.flatnonzero(code == number)
        if not len(mine):  # a dictionary may have words that none of these events use
            continue
        unique, last = np.unique(step[mine][::-1], return_index=True)
        found[name] = Curve(unique, value[mine][::-1][last])
    return found
