"""A sink that keeps all it is given as a plain list, for asserts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from retrograd.core.history.sink import Event, KeptTensor, RowBatch
from retrograd.core.recording.record import Recording
from retrograd.core.recording.recorder import Recorder
from retrograd.core.recording.settings import Settings
from retrograd.core.sites.site import parse_site
from retrograd.core.statistics.row import BINS, ROW, derive


@dataclass(frozen=True)
class Seen:
    """One row. A gradient's numbers have the loss scale divided out; ``backward`` is −1 for anything else."""

    step: int
    micro: int
    backward: int
    phase: str
    site: str
    scale: float
    columns: Mapping[str, Any]
    bins: np.ndarray
    custom: Mapping[str, float]

    def __getattr__(self, name: str) -> Any:
        """A column of the row (``calls``, ``count``, ``sum`` …) or a derived statistic (``mean``, ``rms`` …)."""
        columns = object.__getattribute__(self, "columns")
        custom = object.__getattribute__(self, "custom")
        if name in columns:
            return columns[name].item()
        if name in custom:
            return custom[name]
        try:
            return derive({key: np.array([value]) for key, value in columns.items()}, name)[0].item()
        except KeyError:
            raise AttributeError(name) from None

    def __repr__(self) -> str:
        when = f"step {self.step} micro {self.micro} backward {self.backward} {self.phase}"
        return (
            f"<{self.site} {when}: {self.calls} calls, {self.count} elements, mean {self.mean:.4g}, rms {self.rms:.4g}>"
        )


class Collector:
    """Keeps rows, events, tensors and facts as they come."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rows: list[Seen] = []
        self.events: list[Event] = []
        self.tensors: list[KeptTensor] = []
        self.facts: dict[str, Any] = {}
        self.status = ""

    def describe(self, **facts: Any) -> None:
        self.facts.update(facts)

    def add_sites(self, names: Sequence[str]) -> None:
        self.names += names

    def add_rows(self, batch: RowBatch) -> None:
        bins = np.frombuffer(batch.bins, np.int64)
        start = 0
        for row in np.frombuffer(batch.rows, ROW):
            stretch = bins[start : start + row["bins"]]
            start += int(row["bins"])
            self.rows.append(self._see(batch, row, stretch))
        assert start == len(bins)

    def _see(self, batch: RowBatch, row: np.void, stretch: np.ndarray) -> Seen:
        number = int(row["row"])
        is_gradient = parse_site(self.names[number]).quantity == "grad"
        scale = batch.scale if is_gradient else 1.0
        columns = {name: row[name] for name in ROW.names or () if name not in ("row", "first_bin", "bins")}
        for name, power in (("sum", 1), ("abs_sum", 1), ("min", 1), ("max", 1), ("m2", 2)):
            columns[name] = columns[name] / scale**power
        counts = np.zeros(BINS, np.int64)
        counts[row["first_bin"] : row["first_bin"] + len(stretch)] = stretch
        custom = {
            name: dict(zip(rows, values, strict=True)).get(number, float("nan"))
            for name, (rows, values) in batch.custom.items()
        }
        moment = batch.moment
        backward = moment.backward if is_gradient else -1
        return Seen(
            moment.step, moment.micro, backward, moment.phase, self.names[number], scale, columns, counts, custom
        )

    def add_event(self, event: Event) -> None:
        self.events.append(event)

    def add_tensor(self, kept: KeptTensor) -> None:
        self.tensors.append(kept)

    def flush(self) -> None:
        """All is there already."""

    def close(self, status: str = "finished") -> None:
        self.status = status

    # ---- for asserts ------------------------------------------------------------------------------------------

    def all(self, site: str, **where: Any) -> list[Seen]:
        """Rows of a site, in the order in which they came, for which all attributes in ``where`` are as given."""
        return [row for row in self.rows if row.site == site and _is_like(row, where)]

    def one(self, site: str, **where: Any) -> Seen:
        """The only such row."""
        found = self.all(site, **where)
        assert len(found) == 1, f"{len(found)} rows of {site} with {where}: {found}"
        return found[0]

    def sites(self, **where: Any) -> list[str]:
        """Names of the sites that have such a row, in order."""
        return list(dict.fromkeys(row.site for row in self.rows if _is_like(row, where)))

    def kept(self, site: str, **where: Any) -> list[KeptTensor]:
        """Kept tensors of a site."""
        return [item for item in self.tensors if item.site == site and _is_like(item.moment, where)]

    def events_of(self, kind: str) -> list[Event]:
        """Events of one kind."""
        return [event for event in self.events if event.kind == kind]


def _is_like(thing: Any, where: Mapping[str, Any]) -> bool:
    return all(getattr(thing, name) == value for name, value in where.items())


@contextmanager
def collect(model: nn.Module | Mapping[str, nn.Module], **choices: Any) -> Iterator[Collector]:
    """Record into a new collector with these choices (see ``Settings``); closed like any recording."""
    collector = Collector()
    with Recording(Recorder(model, collector, Settings(**choices)), collector, None):
        yield collector
