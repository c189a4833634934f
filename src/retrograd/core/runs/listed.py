"""The runs of a list, chosen and ordered by what is known of them: as ``retrograd ls`` and the page do it."""

from __future__ import annotations

import difflib
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from retrograd.core.errors import LaunchError
from retrograd.core.runs.listing import RunLine, each_run, find_runs, read_line, to_plain
from retrograd.core.runs.loss_curve import LossCurve, read_curve
from retrograd.core.runs.settings import Setting


class ListedRun(NamedTuple):
    """A run with its loss.

    Attributes:
        line: what its small files say.
        curve: None where it was not read.
    """

    line: RunLine
    curve: LossCurve | None = None

    @property
    def settings(self) -> dict[str, Setting]:
        """Its settings; one that is called as a column of every list, as an option ``loss=l1``, is ``argv.loss``."""
        return {f"argv.{name}" if name in _OWN else name: value for name, value in self.line.settings.items()}

    def as_json(self) -> str:
        """Write all that is known of it, but for the curve, as one line of JSON; what is not finite is text."""
        end = {} if self.curve is None else self.curve.as_facts()
        told = {**self.as_facts(), "final": end.get("final"), "logged": end.get("logged", {})}
        return json.dumps(told, ensure_ascii=False, allow_nan=False)

    def as_facts(self) -> dict[str, Any]:
        """What its small files say, as JSON values; a number that is not finite is text."""
        settings = {name: to_plain(value) for name, value in self.settings.items()}
        return {**self.line.as_facts(), "settings": settings}


def read_listed(parent: Path) -> list[ListedRun]:
    """All runs of a folder, in no order.

    Raises:
        NotARunError: there is no such folder.
    """
    return each_run(lambda run: ListedRun(read_line(run), read_curve(run)), find_runs(parent))


def choose_listed(
    runs: Sequence[ListedRun], sort: str, conditions: Iterable[str] = (), search: str = "", *, is_reversed: bool = False
) -> list[ListedRun]:
    """Those for which all conditions hold and that contain all words, in the order of a column.

    Raises:
        LaunchError: there is no such column, or a condition is none; the nearest is named.
    """
    columns = list_columns(runs)
    column, asked = find_column(sort, columns), [read_condition(each, columns) for each in conditions]
    words = search.split()
    chosen = (
        run for run in runs if all(each.holds(run) for each in asked) and all(contains(run, word) for word in words)
    )
    return sort_listed(chosen, column, is_reversed=is_reversed)


_OWN: dict[str, Callable[[ListedRun], Any]] = {
    "name": lambda run: run.line.name,
    "when": lambda run: run.line.started or run.line.written or None,
    "steps": lambda run: run.line.last_step,
    "status": lambda run: run.line.status,
    "loss": lambda run: run.line.loss,
    "final": lambda run: run.curve and run.curve.final,
    "findings": lambda run: None if run.line.findings is None else sum(run.line.findings.values()),
    "finding": lambda run: " ".join(run.line.found) if run.line.findings is not None else None,
}
"""Columns that every list has; the others are settings, and what was logged."""

_WORST = ("critical", "warning", "note")
_DESCENDING = ("when", "steps", "findings")
_CONDITION = re.compile(r"(.+?)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def find_differing(settings: Sequence[Mapping[str, Setting]]) -> list[str]:
    """Names of the settings in which runs differ, each once: of two that go together the first.

    ``argv`` is left out where options say the same; and which steps were recorded, which changes no training.
    """
    names = list(dict.fromkeys(name for each in settings for name in each if name != "schedule"))
    columns = {name: tuple(_sort_of(each.get(name)) for each in settings) for name in names}
    differing = {name: column for name, column in columns.items() if len(set(column)) > 1}
    argv = differing.pop("argv", None)
    first = {column: name for name, column in reversed(differing.items())}
    kept = [name for name, column in differing.items() if first[column] == name]
    if argv is not None and len(set(argv)) > len(set(zip(*(columns[name] for name in kept), strict=True))):
        kept.insert(0, "argv")
    return kept


def _sort_of(value: Setting | None) -> tuple[bool, Setting | None]:
    """What is equal for the same setting: of 0 and 0.0, as an option and an optimizer have it; not of 1 and True."""
    return isinstance(value, bool), repr(value) if value != value else value  # NaN differs from itself


def value_of(run: ListedRun, column: str) -> Any:
    """What a run has in a column; None where that is not known."""
    if column in _OWN:
        return _OWN[column](run)
    settings = run.settings
    if column in settings:
        return settings[column]
    return run.curve.logged.get(column) if run.curve else None


def list_columns(runs: Iterable[ListedRun]) -> list[str]:
    """Names of all columns by which runs can be ordered and chosen."""
    logged = (name for run in runs for name in [*run.settings, *(run.curve.logged if run.curve else ())])
    return list(dict.fromkeys((*_OWN, *logged)))


def find_column(word: str, columns: Sequence[str]) -> str:
    """The column that is meant by a word: its name, or ``lr`` for ``--lr``.

    Raises:
        LaunchError: there is none; the nearest is named.
    """
    found = next((name for name in columns if name == word), None)
    found = found or next((name for name in columns if name.lstrip("-").lower() == word.lstrip("-").lower()), None)
    if found is not None:
        return found
    near = difflib.get_close_matches(word, columns, n=1, cutoff=0.5)
    raise LaunchError(
        f"No run has a column {word!r}.",
        repair=f"did you mean {near[0]!r}? There are {', '.join(columns)}."
        if near
        else f"there are {', '.join(columns)}.",
    )


# ---- order ----


def sort_listed(runs: Iterable[ListedRun], column: str, *, is_reversed: bool = False) -> list[ListedRun]:
    """Runs by a column: newest, most steps and worst first, all else rising; NaN and what is not known come last.

    Names are in the order of their numbers: run2 before run10.
    """
    newest = sorted(runs, key=lambda run: (-(run.line.started or run.line.written), natural(run.line.name)))
    groups: tuple[list[Any], ...] = ([], [], [], [])
    for run in newest:
        key = _order_of(run, column)
        groups[key[0]].append((key[1], run))
    is_falling = is_reversed != (column in _DESCENDING)
    for group in groups[:2]:
        group.sort(key=lambda each: each[0], reverse=is_falling)
    return [run for group in groups for _, run in group]


def natural(text: str) -> list[tuple[int, float, str]]:
    """A key by which run2 is before run10."""
    words = re.split(r"([0-9]+)", text.lower())
    return [(0, float(word), "") if word[0] in "0123456789" else (1, 0.0, word) for word in words if word]


def _order_of(run: ListedRun, column: str) -> tuple[int, Any]:
    """In which of four groups a run is (numbers, texts, NaN, not known), and where in it."""
    value = value_of(run, column)
    if value is None:
        return 3, None
    if column == "findings":
        counts = run.line.findings or {}
        return 0, [counts.get(each, 0) for each in _WORST]
    if isinstance(value, str):
        return 1, natural(value)
    return (2, None) if value != value else (0, value)


# ---- choice ----


class Condition(NamedTuple):
    """What a run must be, as in ``lr>=0.01``."""

    column: str
    comparison: str
    value: str

    def holds(self, run: ListedRun) -> bool:
        """Return whether it is so of a run; of what is not known nothing is, but that it is other."""
        found, wanted = value_of(run, self.column), self.value.lower()
        if self.comparison in ("=", "!="):
            return _is_equal(found, wanted, is_list=self.column == "finding") == (self.comparison == "=")
        return _COMPARISONS[self.comparison](_read_number(found), _read_number(wanted))  # nothing is true of NaN


_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|nan|-?inf", re.IGNORECASE)


def _read_number(told: Any) -> float:
    """The number that a value is or says, as the page reads it; NaN where it is none."""
    try:
        return float(told) if not isinstance(told, str) or _NUMBER.fullmatch(told) else math.nan
    except (TypeError, OverflowError):  # None, or a whole number beyond any float
        return math.nan if told is None else math.copysign(math.inf, told)


def _is_equal(found: Any, wanted: str, *, is_list: bool) -> bool:
    if found is None:
        return wanted in ("", "none")
    if isinstance(found, str):
        return wanted in ([*found.lower().split(), *([] if found else ["none"])] if is_list else [found.lower()])
    if isinstance(found, bool):
        return wanted == str(found).lower()
    number = _read_number(found)
    return number == _read_number(wanted) or (wanted == "nan" and math.isnan(number))


def read_condition(text: str, columns: Sequence[str]) -> Condition:
    """The condition that a text is.

    Raises:
        LaunchError: it is none, or there is no such column.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise LaunchError(f"{text!r} is not a condition.", repair="write one as in status=failed or 'lr>=0.01'.")
    return Condition(find_column(match[1], columns), match[2], match[3])


def contains(run: ListedRun, word: str) -> bool:
    """Return whether a word, in letters of any case, is in the name of a run, its status, findings or settings."""
    line = run.line
    texts = [line.name, line.status, *line.found, *(f"{name}={_say(value)}" for name, value in run.settings.items())]
    return any(word.lower() in text.lower() for text in texts)


def _say(value: Setting) -> str:
    """A setting as a page says it, which knows no 1.0 and writes 1e-05 as 0.00001."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if value and not 1e-6 <= abs(value) < 1e21:
        return np.format_float_scientific(value, trim="-", exp_digits=1)
    return np.format_float_positional(value, trim="-")
