"""Simulates what a rule would have done to a run that was recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from retrograd.core.errors import RuleError
from retrograd.core.history.history import History
from retrograd.rewriting.rules.norm_rule import NormRule, measure_norm
from retrograd.rewriting.rules.occasions import Occasion, join_occasions, list_norms, list_tensors, load
from retrograd.rewriting.rules.pass_rule import PassRule
from retrograd.rewriting.rules.rule import Change, Rule, as_rule

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("micro", pa.int32()),
        ("backward", pa.int16()),
        ("rank", pa.int32()),
        ("site", pa.string()),
        ("before", pa.float64()),
        ("after", pa.float64()),
        ("change", pa.float64()),
        ("acted", pa.bool_()),
    ]
)


class SimulatedChange(NamedTuple):
    """A tensor before and after the rule."""

    step: int
    micro: int
    backward: int
    rank: int
    site: str
    before: float
    after: float
    change: float
    acted: bool


class RuleSimulation:
    """Shows what a rule would have done; ``print`` it for a line a site, the largest change first.

    Attributes:
        rule: the rule as printed.
        table: a row a tensor, as they came: ``step``, ``micro``, ``backward``, ``rank`` and ``site`` as in a record;
            ``before`` and ``after``, norms of the tensor; ``change``, ‖new − old‖ / ‖old‖; ``acted``, whether any
            element changed.
    """

    def __init__(self, rule: str, outcomes: Iterable[SimulatedChange]) -> None:
        self.rule = rule
        columns = list(zip(*outcomes, strict=True)) or [()] * len(SCHEMA)
        self.table: pa.Table = pa.table(
            [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], SCHEMA
        )

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Steps at which the rule acted anywhere, rising: int64."""
        return np.unique(self._column("step")[self._column("acted")])

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        acted = int(self._column("acted").sum())
        return f"Simulation({self.rule}: acted on {acted:,} of {len(self):,} tensors, at {len(self.steps):,} steps)"

    def __str__(self) -> str:
        steps = self._column("step")
        span = f", steps {steps.min():,} to {steps.max():,}" if len(steps) else ""
        names = list(dict.fromkeys(self.table["site"].to_pylist()))
        lines = [(name, *self._describe(name)) for name in names]
        acted = sorted((line for line in lines if line[2]), key=lambda line: line[1:3], reverse=True)
        width = max((len(name) for name, *_ in acted), default=0)
        text = [self.rule + span]
        text += [f"  {name:<{width}}  {words}" for name, _, _, words in acted]
        if len(acted) < len(names):
            text.append(f"  {len(names) - len(acted):,} left alone" if acted else "  nothing would have changed")
        return "\n".join(text)

    def _describe(self, name: str) -> tuple[float, int, str]:
        """The largest change at a site, how often the rule acted, and both in words."""
        here = self._column("site") == name
        acted = np.flatnonzero(here & self._column("acted"))
        if not len(acted):
            return 0.0, 0, ""
        change = np.nan_to_num(self._column("change")[acted], nan=np.inf, posinf=np.inf)
        worst = acted[int(change.argmax())]
        before, after, step = (self._column(column)[worst] for column in ("before", "after", "step"))
        share = f"acted {len(acted):,} of {int(here.sum()):,} times"
        words = f"{share}; most at step {step:,}: norm {before:.3g} to {after:.3g}"
        return float(change.max()), len(acted), words

    def _column(self, name: str) -> npt.NDArray[np.generic]:
        return np.asarray(self.table[name].to_numpy())


class HasHistory(Protocol):
    """A run as ``rg.open_run`` gives it, or a recording."""

    @property
    def history(self) -> History:
        """The record."""


def simulate_rule(
    rule: Rule | Change, record: History | HasHistory, sites: str | Iterable[str], *, together: bool = False
) -> RuleSimulation:
    """Run a rule over a recording: what it would have done to each tensor, had all gone as recorded until then.

    A rule of the norm needs no more than the statistics that are recorded by default; any other rule needs kept
    tensors. It begins without memory, on a copy, once for each rank, and sees what was recorded in training: where a
    schedule or a policy of keeping left out steps, it sees fewer than it would have seen live. Recorded norms are
    sums in float64 and are rounded to float32, so decisions are those of the live rule to that rounding.

    Args:
        rule: a rule, or a function ``(value, state) -> tensor``.
        record: a history, or what has one: a run, a recording.
        sites: names or patterns, as in ``"*:parameters.grad"``.
        together: take all sites as one vector, as a rule on an optimizer does: one norm and one factor a step.

    Returns:
        What it did, as a table that prints itself.

    Raises:
        RuleError: when what the rule needs was not recorded; or ``together`` for a rule that is not one of the norm,
            or for steps of several backward passes, whose sum has a norm that was not recorded.
        NoSuchSiteError: for a pattern that matches no recorded site.
    """
    rule = as_rule(rule)
    _check(rule, together)
    history = _history_of(record)
    names = history.select(sites if isinstance(sites, str) else list(sites))
    occasions: list[Occasion] = []
    for name in names:
        if isinstance(rule, NormRule):
            occasions += list_norms(history, name, rule.name)
        else:
            occasions += list_tensors(
                history, name, rule.name, with_values=rule.needs_value, with_inputs=rule.needs_input
            )
    occasions.sort(key=lambda each: each.when)
    if together:
        occasions = list(join_occasions(occasions))
    with torch.no_grad():
        return RuleSimulation(rule.name, _run(rule, occasions))


def _check(rule: Rule, together: bool) -> None:
    if isinstance(rule, PassRule):
        raise RuleError(
            f"{rule.name} cannot be simulated.",
            repair="simulate rules that act on one gradient at a time.",
            reason="it combines the gradients of several losses to all parameters, before they are added up.",
        )
    if together and not isinstance(rule, NormRule):
        raise RuleError(
            f"{rule.name} does not act on all sites as one vector.",
            repair="leave `together` out.",
            reason="only rules of the norm are made for that.",
        )


def _history_of(record: object) -> History:
    history = record if isinstance(record, History) else getattr(record, "history", None)
    if not isinstance(history, History):
        raise RuleError(
            f"{record!r} has no history.", repair="give a history, or a run as rg.open_run(folder) opens it."
        )
    return history


def _run(rule: Rule, occasions: Iterable[Occasion]) -> Iterator[SimulatedChange]:
    """Act on each occasion with a copy of the rule, one a rank."""
    copies: dict[int, Rule] = {}
    for occasion in occasions:
        when = occasion.when
        if when.rank not in copies:
            copies[when.rank] = rule.without_memory()
        outcome = _act(copies[when.rank], occasion)
        yield SimulatedChange(when.step, when.micro, when.backward, when.rank, occasion.site, *outcome)


def _act(rule: Rule, occasion: Occasion) -> tuple[float, float, float, bool]:
    """The norms before and after, the relative change, and whether anything changed."""
    state = rule.state_at(occasion.memory)
    state.step, state.rank, state.call = occasion.when.step, occasion.when.rank, abs(occasion.when.turn)
    state.value = None if occasion.value is None else load(occasion.value)
    state.inputs = {key: load(kept) for key, kept in occasion.inputs.items()}
    if isinstance(rule, NormRule):
        norm = occasion.load_norm()
        factor = rule.scale(norm, state).item()
        return norm.item(), norm.item() * factor if factor else 0.0, abs(1 - factor), factor != 1
    if occasion.kept is None:
        raise RuntimeError("a rule that needs tensors was given a norm")
    value = load(occasion.kept)
    changed = rule(value, state)
    return _compare(value, value if changed is None else changed)


def _compare(old: Tensor, new: Tensor) -> tuple[float, float, float, bool]:
    is_same = (new == old) | ((new != new) & (old != old))
    before, after = measure_norm(old).item(), measure_norm(new).item()
    difference = measure_norm(torch.where(is_same, 0, new - old)).item()
    change = difference / before if before else float("inf") if difference else 0.0
    return before, after, change, not bool(is_same.all())
