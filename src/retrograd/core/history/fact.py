"""Base class of facts, and how they are written as events.

A fact is an event whose ``kind`` is that of its class and whose ``text`` is a JSON object with its other
fields, but for ``name`` and ``value``, which have columns of their own, and for numbers that are not known. Step,
micro-batch and phase are those of the event.

Where there are many of a kind, one event holds several: ``rows`` are lists of what ``each`` names, among it ``name``,
``value``, ``step`` and ``phase`` where they are not the event's; all else is the same for all of them, and the event's
``value`` is how many they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from retrograd.core.history.sink import Event, EventKind, Moment

JsonObject = Mapping[str, Any]

NOW = Moment(-1)
"""The moment of a fact that does not say when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Base class of facts.

    Attributes:
        name: what it is about.
        value: its number; NaN where there is none.
        moment: when.
        rank: in which process; not written, for the folder tells it.
    """

    kind: ClassVar[EventKind]

    name: str = ""
    value: float = math.nan
    moment: Moment = NOW
    rank: int = 0

    @property
    def step(self) -> int:
        """The step it is of."""
        return self.moment.step

    @property
    def text(self) -> str:
        """Its own fields as JSON."""
        own = {name: getattr(self, name) for name in self.__slots__}
        known = {name: value for name, value in own.items() if not (isinstance(value, float) and math.isnan(value))}
        return json.dumps(known, separators=(",", ":"), default=list)

    @classmethod
    def all_of_event(cls, event: Event, rank: int = 0) -> list[Self]:
        """Read all facts of an event again.

        Raises:
            ValueError, TypeError: the event's text holds no such facts.
        """
        found = json.loads(event.text)
        if not isinstance(found, dict):
            raise TypeError(f"{event.kind} of {event.name!r} is not JSON object")
        if "rows" not in found:
            return [cls._make(event, rank, {"value": event.value, **found})]
        each, rows = found.pop("each"), found.pop("rows")
        return [cls._make(event, rank, {**found, **dict(zip(each, row, strict=True))}) for row in rows]

    @classmethod
    def _make(cls, event: Event, rank: int, found: JsonObject) -> Self:
        known = {name: _freeze(value) for name, value in found.items() if value is not None}
        when = {name: known.pop(name) for name in _WHEN & known.keys()}
        own = {name: known[name] for name in _list_names(cls) & known.keys()}
        moment = replace(event.moment, **when) if when else event.moment
        return cls(**{"name": event.name, **own, "moment": moment, "rank": rank})


_WHEN = frozenset({"step", "micro", "phase"})
_names: dict[str, frozenset[str]] = {}


def _list_names(kind: type[Any]) -> frozenset[str]:
    names = _names.get(kind.__name__)
    if names is None:
        names = _names[kind.__name__] = frozenset(each.name for each in fields(kind))
    return names


def tell_number(number: float) -> str:
    """A number as JSON; one that is not known as null."""
    return "null" if math.isnan(number) else repr(number) if math.isfinite(number) else json.dumps(number)


def tell_many(same: JsonObject, each: Sequence[str], rows: Iterable[str]) -> str:
    """The text of an event that holds several facts.

    Args:
        same: fields that are the same for all.
        each: names of the fields in the rows.
        rows: JSON lists.
    """
    head = json.dumps({**same, "each": each}, separators=(",", ":"))
    return f'{head[:-1]},"rows":[{",".join(rows)}]}}'


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
