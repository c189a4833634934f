"""Events as a table, as a list, and as the curve of the loss."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from retrograd.history.matrix import Curve, number_steps
from retrograd.history.sink import Event, Moment
from retrograd.history.table import EVENT_COLUMNS, make_schema

EVENT_SCHEMA = make_schema(EVENT_COLUMNS)
_MOMENT = ("step", "micro", "backward", "phase")
_OWN = ("kind", "name", "value", "text", "time")


def build_event_table(events: Sequence[Event]) -> pa.Table:
    """Events as a table of :data:`retrograd.history.table.EVENT_COLUMNS`."""
    moment, own = operator.attrgetter(*_MOMENT), operator.attrgetter(*_OWN)
    lines = [(*moment(event.moment), *own(event)) for event in events]
    values = list(zip(*lines, strict=True)) or [()] * len(EVENT_SCHEMA)
    plain = {field.name: pa.array(column) for field, column in zip(EVENT_SCHEMA, values, strict=True)}
    return pa.table(plain).cast(EVENT_SCHEMA) if lines else EVENT_SCHEMA.empty_table()


def read_events(table: pa.Table) -> list[Event]:
    """The events of a table."""
    columns = [table[name].to_pylist() for name in (*_MOMENT, *_OWN)]
    return [Event(Moment(*line[:4]), *line[4:]) for line in zip(*columns, strict=True)]


def read_loss(table: pa.Table) -> Curve:
    """The loss of each step: the mean of all that backward started from in it."""
    losses = table.filter(pc.equal(table["kind"].cast(pa.string()), "loss"))
    steps, groups = number_steps(losses["step"].to_numpy())
    total = np.bincount(groups, losses["value"].to_numpy(), minlength=len(steps))
    return Curve(steps, total / np.bincount(groups, minlength=len(steps)))
