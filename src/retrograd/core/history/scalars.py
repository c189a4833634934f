"""Numbers of which a step has one: its loss, its rate, norms over all parameters, and what the user has logged."""

from __future__ import annotations

import datetime as dt
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from retrograd.core.drawings import drawn_by
from retrograd.core.errors import NoSuchNameError
from retrograd.core.history.arrays import read_codes, read_numbers, to_numbers
from retrograd.core.history.curve import Curve
from retrograd.core.history.events import Events
from retrograd.core.history.scalar_names import (
    BATCH,
    EVAL_LOSS,
    GRAD_NORM,
    GRAD_NORM_CLIPPED,
    LOSS,
    LR,
    MEMORY,
    OWN,
    REFERENCE,
    SAMPLES,
    SCALAR,
    SCALE,
    SHARDS,
    STEP_TIME,
    THROUGHPUT,
    UPDATE_RATIO,
)
from retrograd.core.history.sink import ENDS_NONE
from retrograd.core.history.steps import number_steps
from retrograd.core.libraries import load_library


@dataclass(frozen=True, slots=True)
class ScalarInfo:
    """What a series is.

    Attributes:
        name: its name.
        unit: ``s``, ``B``, ``samples/s``, ``tokens/s``; empty for a plain number.
        about: how it was taken, in a sentence.
    """

    name: str
    unit: str
    about: str


_ABOUT = {
    LOSS: ("", "mean of all scalars from which the backward passes of a step started, without loss scaling"),
    EVAL_LOSS: (
        "",
        "mean over the calls of an evaluation of the loss: returned by the model, or by a loss function of torch",
    ),
    LR: ("", "learning rate when the update begins"),
    GRAD_NORM: ("", "L2 norm of the gradients that optimizers get, over all their parameters, before clip_grad_norm_"),
    GRAD_NORM_CLIPPED: ("", "the same after clip_grad_norm_ or clip_grad_value_"),
    UPDATE_RATIO: ("", "‖Δw‖ / ‖w‖ over all parameters whose update is recorded"),
    STEP_TIME: ("s", "from one update (by hand: pass) to the next: with data, evaluations, and the recording itself"),
    THROUGHPUT: ("", "of all micro-batches of a step, over step_time; of one process"),
    MEMORY: ("B", "given out by torch on the devices of the parameters; on the CPU, all that the process holds"),
    SCALE: ("", "what the loss was multiplied by, by a GradScaler"),
}
"""Of each series of ours its unit and what it is, in the order in which they are listed."""

SCALAR_NAMES = frozenset({
    "eval_loss", "lr", "grad_norm", "grad_norm_clipped", "update_ratio", "step_time", "throughput", "memory", "scale",
    "epoch",
})  # fmt: skip
"""Those that a history has as attributes too, as far as they were recorded: ``history.lr``."""


class Scalars(Mapping[str, Curve]):
    """Series of one number a step, by name: ``loss`` first, what the program has logged last.

        history.scalars["grad_norm"].values
        history.scalars.about("throughput").unit       samples/s
        history.scalars.to_pandas()                    a column each, by step

    What the program has logged under the name of one of ours is ``logged/NAME``.

    Args:
        events: those of a record.
        manifest: of the run: says when it was resumed, and which steps were recorded.
    """

    def __init__(self, events: Events, manifest: Mapping[str, Any] | None = None) -> None:
        self._events, self._manifest = events, manifest or {}

    def __getitem__(self, name: str) -> Curve:
        """The curve of this name.

        Raises:
            NoSuchNameError: there is none (a KeyError); the nearest are named.
        """
        if name not in self._curves:
            raise self._miss(name)
        return self._curves[name]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Curve:
            """The same: ``history.scalars.loss``."""
            if name.startswith("_"):
                raise AttributeError(name)
            return self[name]

    def _miss(self, name: str) -> NoSuchNameError:
        several = [each for each in self if each.startswith(f"{name}[")]
        nearest = several or difflib.get_close_matches(str(name), self, n=1)
        known = f"these scalars of each step are: {', '.join(self) or 'none'}."
        repair = f"history.scalars[{nearest[0]!r}]; {known}" if nearest else known
        return NoSuchNameError(f"No {str(name)!r} was recorded.", repair=repair)

    def __iter__(self) -> Iterator[str]:
        return iter(self._curves)

    def __len__(self) -> int:
        return len(self._curves)

    def __repr__(self) -> str:
        return f"Scalars({', '.join(self)})"

    _repr_html_ = drawn_by("retrograd.core.views.notebook.records", "draw_scalars")

    def about(self, name: str) -> ScalarInfo:
        """What a series is, and how it was taken.

        Raises:
            NoSuchNameError: there is no such series (a KeyError).
        """
        self[name]
        base = name.partition("[")[0]
        if base not in _ABOUT:
            return ScalarInfo(name, "", "logged by the program")
        unit, about = _ABOUT[base]
        schedule = str(self._manifest.get("schedule") or "every step")
        if base in (LOSS, LR, GRAD_NORM, GRAD_NORM_CLIPPED, UPDATE_RATIO) and schedule != "every step":
            about += self._tell_steps(name, schedule)
        return ScalarInfo(name, f"{self._counted}/s" if base == THROUGHPUT else unit, about)

    def _tell_steps(self, name: str, schedule: str) -> str:
        """At how many steps it is; nothing where it is at each: within a budget that holds of losses, rates, and more.

        A loss is where there was a pass, a rate at each update of its optimizer.
        """
        steps = self._steps
        if len(steps) and len(steps) <= steps[-1] - steps[0]:
            return f"; at recorded steps ({schedule})"
        found = int(np.isin(steps, self[name].steps).sum())
        if found == len(steps) or name.partition("[")[0] in (LOSS, LR):
            return ""
        return f"; at {found:,} of {len(steps):,} steps ({schedule})"

    @cached_property
    def _steps(self) -> npt.NDArray[np.int64]:
        """Steps with a loss, or an update, that were noted."""
        updates = _read_updates(self._events).values()
        return number_steps(np.concatenate([self._events.loss.steps, *(each.steps for each in updates)]))[0]

    def is_logged(self, name: str) -> bool:
        """True for what the program has logged."""
        return name.partition("[")[0] not in _ABOUT

    @property
    def last(self) -> dict[str, float]:
        """The newest number of each."""
        return {name: float(curve.values[-1]) for name, curve in self.items() if len(curve.values)}

    def to_arrow(self) -> pa.Table:
        """A row for each step of which anything is known: ``step``, and a column each; NaN where there is none."""
        steps, _ = number_steps(np.concatenate([np.empty(0, np.int64), *(curve.steps for curve in self.values())]))
        columns = {"step": to_numbers(steps)}
        for name, curve in self.items():
            filled = np.full(len(steps), np.nan)
            filled[np.searchsorted(steps, curve.steps)] = curve.values
            columns[name] = to_numbers(filled)
        return pa.table(columns)

    def to_pandas(self) -> Any:
        """The same as a ``pandas.DataFrame`` whose index is the step.

        Raises:
            LibraryError: pandas is not installed.
        """
        load_library("pandas", "pandas", "2.0")
        return self.to_arrow().to_pandas().set_index("step")

    def to_polars(self) -> Any:
        """The same as a ``polars.DataFrame``.

        Raises:
            LibraryError: polars is not installed.
        """
        return load_library("polars", "polars", "1.0").from_arrow(self.to_arrow())

    # ---- how they are made ----

    @cached_property
    def _recorded(self) -> _Recorded:
        return _read(self._events)

    @property
    def _counted(self) -> str:
        return self._recorded.counted

    @cached_property
    def _curves(self) -> dict[str, Curve]:
        recorded = self._recorded
        found = {LOSS: self._events.loss, **recorded.own}
        updates = _read_updates(self._events)
        found |= _expand_rates(recorded.rates, updates, _find_first_optimizer(self._manifest))
        made = updates or _read_updates(self._events, LOSS)
        if made:
            ending = _join([each for each in made.values() if each.ends] or made.values())
            found[STEP_TIME] = time = _measure_steps(ending, _read_starts(self._manifest))
            found[THROUGHPUT] = _count_a_second(recorded.batch, time)
        found[SCALE] = _read_scales(self._events)
        found |= {f"logged/{name}" if name in found else name: curve for name, curve in recorded.logged.items()}
        order = sorted(found, key=lambda name: _RANKS.get(name.partition("[")[0], len(_RANKS)))
        return {name: found[name] for name in order if len(found[name].steps)}


_RANKS = {name: rank for rank, name in enumerate(_ABOUT)}


class _Recorded(NamedTuple):
    """What scalar events hold: series of ours, of the program's, changes of rates by optimizer and group, batches."""

    own: dict[str, Curve]
    logged: dict[str, Curve]
    rates: dict[str, Curve]
    batch: Curve
    counted: str


def _read(events: Events) -> _Recorded:
    names: dict[str, int] = {}
    texts: dict[str, int] = {}
    pieces = [
        (
            read_numbers(piece["step"]),
            read_codes(piece["name"], names),
            read_codes(piece["text"].dictionary_encode(), texts),
            read_numbers(piece["value"]),
        )
        for piece in events.pieces(["step", "name", "value", "text"], (SCALAR,))
    ]
    own: dict[str, Curve] = {}
    logged: dict[str, Curve] = {}
    rates: dict[str, Curve] = {}
    batch, counted = _NO_CURVE, SAMPLES
    before: Curve | None = None
    if not names:
        return _Recorded(own, logged, rates, batch, counted)
    step, name_of, text_of, value = (np.concatenate(column) for column in zip(*pieces, strict=True))
    told = list(texts)
    for name, code in names.items():
        mine = np.flatnonzero(name_of == code)
        for text in dict.fromkeys(np.unique(text_of[mine]).tolist()):
            chosen = mine[text_of[mine] == text]
            word = told[text]
            curve = _combine(name, word, step[chosen], value[chosen])
            if word == "":
                logged[name] = curve
            elif name == LR:
                rates[word] = curve
            elif name == BATCH:
                batch, counted = curve, word
            elif word == REFERENCE:
                before = curve
            else:
                own[name] = _join_curves(own.get(name, _NO_CURVE), curve)
    if before is not None and UPDATE_RATIO in own and np.array_equal(before.steps, own[UPDATE_RATIO].steps):
        own[UPDATE_RATIO] = Curve(before.steps, own[UPDATE_RATIO].values / before.values)
    return _Recorded(own, logged, rates, batch, counted)


_NO_CURVE = Curve(np.empty(0, np.int64), np.empty(0))


def _join_curves(first: Curve, second: Curve) -> Curve:
    steps, values = np.concatenate((first.steps, second.steps)), np.concatenate((first.values, second.values))
    return _combine("", "", steps, values)


def _combine(name: str, text: str, steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> Curve:
    """One number a step: of several processes the norm over all, the mean loss, the largest memory; else the last."""
    unique, group = number_steps(steps)
    if len(unique) == len(steps):
        order = np.argsort(steps, kind="stable")
        return Curve(steps[order], values[order])
    if text in (SHARDS, REFERENCE):
        return Curve(unique, np.sqrt(np.bincount(group, values**2, len(unique))))
    if text == OWN and name == EVAL_LOSS:
        return Curve(unique, np.bincount(group, values, len(unique)) / np.bincount(group, minlength=len(unique)))
    if text == OWN and name == MEMORY:
        largest = np.full(len(unique), -np.inf)
        np.maximum.at(largest, group, values)
        return Curve(unique, largest)
    last = np.empty(len(unique))
    last[group] = values  # of equal places the last is kept
    return Curve(unique, last)


# ---- from updates ----


class _Updates(NamedTuple):
    """Updates of one optimizer: their steps, when each was, and whether they end steps."""

    steps: npt.NDArray[np.int64]
    times: npt.NDArray[np.float64]
    ends: bool


def _read_updates(events: Events, kind: str = "update") -> dict[str, _Updates]:
    names: dict[str, int] = {}
    found: list[tuple[Any, ...]] = []
    for piece in events.pieces(["step", "name", "time", "text"], (kind,)):
        texts: dict[str, int] = {}
        codes = read_codes(piece["text"].dictionary_encode(), texts)
        ends = np.array([not text.endswith(ENDS_NONE) for text in texts], np.bool_)[codes]
        found.append((read_numbers(piece["step"]), read_codes(piece["name"], names), read_numbers(piece["time"]), ends))
    if not names:
        return {}
    step, code, time, ends = (np.concatenate(column) for column in zip(*found, strict=True))
    updates = {}
    for name, number in names.items():
        mine = np.flatnonzero(code == number)
        if len(mine):
            steps, group = number_steps(step[mine])
            times = np.empty(len(steps))
            times[group] = time[mine]
            updates[name] = _Updates(steps, times, bool(ends[mine].any()))
    return updates


def _join(updates: Iterable[_Updates]) -> _Updates:
    several = list(updates)
    steps, group = number_steps(np.concatenate([np.empty(0, np.int64), *(each.steps for each in several)]))
    times = np.full(len(steps), -np.inf)
    np.maximum.at(times, group, np.concatenate([np.empty(0), *(each.times for each in several)]))
    return _Updates(steps, times, True)


def _fill_forward(changes: Curve, steps: npt.NDArray[np.int64]) -> Curve:
    """At each of some steps the value that was noted last."""
    place = np.searchsorted(changes.steps, steps, side="right") - 1
    known = place >= 0
    return Curve(steps[known], changes.values[place[known]])


def _expand_rates(rates: Mapping[str, Curve], updates: Mapping[str, _Updates], first: str) -> dict[str, Curve]:
    """Learning rates at each update: ``lr``; ``lr[0]`` of several groups, ``lr[SGD_2]`` of a later optimizer.

    A name stays what it is when another optimizer comes.
    """
    found = {}
    optimizers = [key.rpartition("[")[0] for key in rates]
    first = first if first in optimizers else (optimizers or [""])[0]
    for key, changes in rates.items():
        optimizer, _, group = key.rpartition("[")
        groups = sum(each.startswith(f"{optimizer}[") for each in rates)
        name = LR + (f"[{optimizer}]" if optimizer != first else "") + (f"[{group}" if groups > 1 else "")
        found[name] = _fill_forward(changes, updates[optimizer].steps) if optimizer in updates else changes
    return found


def _find_first_optimizer(manifest: Mapping[str, Any]) -> str:
    """The name of the optimizer that has updated first; empty where the manifest tells none."""
    listed = manifest.get("optimizers")
    first = listed[0] if isinstance(listed, list) and listed else None
    return str(first.get("name", "")) if isinstance(first, Mapping) else ""


def _measure_steps(updates: _Updates, starts: list[float]) -> Curve:
    """Seconds of each step, where one before it is known and the run was not resumed in between."""
    steps, times, _ = updates
    if len(steps) < 2:
        return _NO_CURVE
    seconds = np.diff(times) / np.diff(steps)
    session = np.searchsorted(np.array(starts), times, side="right")
    known = (np.diff(session) == 0) & (times[:-1] > 0) & (seconds >= 0)
    return Curve(steps[1:][known], seconds[known])


def _count_a_second(batch: Curve, time: Curve) -> Curve:
    sizes = _fill_forward(batch, time.steps)
    seconds = time.values[len(time.values) - len(sizes.values) :]
    known = seconds > 0
    return Curve(sizes.steps[known], sizes.values[known] / seconds[known])


def _read_starts(manifest: Mapping[str, Any]) -> list[float]:
    """When each later session of the run began, in seconds since the epoch."""
    resumed = manifest.get("resumed")
    sessions = [each for each in resumed if isinstance(each, Mapping)] if isinstance(resumed, list) else []
    return sorted(filter(None, (_read_time(each.get("started")) for each in sessions)))


def _read_time(text: Any) -> float:
    try:
        return dt.datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _read_scales(events: Events) -> Curve:
    pieces = list(events.pieces(["step", "value"], (SCALE,)))
    steps = np.concatenate([np.empty(0, np.int64), *(read_numbers(piece["step"]) for piece in pieces)])
    values = np.concatenate([np.empty(0), *(read_numbers(piece["value"]) for piece in pieces)])
    return _combine(SCALE, "", steps, values)
