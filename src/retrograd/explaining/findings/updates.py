"""Updates of optimizers, each with the calls of the program since the update before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from retrograd.core.groups import gather
from retrograd.core.history.facts import Call, OptimizerMade

HABIT = 0.8
"""Share of the updates that must be concerned, to be no single slip; our own choice."""

CLIPS = ("clip_grad_norm_", "clip_grad_value_")
"""Calls that clip gradients."""

BY_HAND = ""
"""The optimizer of a program that updates by hand."""


@dataclass(frozen=True, slots=True)
class Update:
    """An update of an optimizer.

    Attributes:
        optimizer: as in ``SGD_2``; empty where the program updates by hand.
        call: the call of ``step``, of ``scaler.step`` where loss scaling has skipped it; where the program updates by
            hand, the last one of that step.
        before: calls since the update before of the same optimizer, in order.
        is_first: there was none before.
    """

    optimizer: str
    call: Call
    before: tuple[Call, ...]
    is_first: bool

    @property
    def step(self) -> int:
        """The step that it ends."""
        return self.call.step

    def named(self, *names: str) -> list[Call]:
        """Calls of these names, in order."""
        return [call for call in self.before if call.name in names]

    def after_last(self, name: str) -> tuple[Call, ...]:
        """The calls behind the last one of a name; all where there is none."""
        places = [place for place, call in enumerate(self.before) if call.name == name]
        return self.before[places[-1] + 1 :] if places else self.before


def find_updates(calls: Iterable[Call], *, by_hand: bool = True) -> list[Update]:
    """The updates of a program, in their order; ``by_hand`` where it may update without an optimizer of torch."""
    listed = list(calls)
    ends = _list_ends(listed)
    if not ends:
        return _find_by_hand(listed) if by_hand else []
    since: dict[str, int] = {}
    found = []
    for place, call in enumerate(listed):
        if place in ends:
            begin = since.get(call.about)
            found.append(Update(call.about, call, tuple(listed[begin or 0 : place]), begin is None))
            since[call.about] = place + 1
    return found


def _list_ends(calls: Sequence[Call]) -> set[int]:
    """The places of calls that make an update, or would have if loss scaling had not skipped it."""
    found = set()
    for place, call in enumerate(calls):
        if call.name == "step":
            found.add(place)
        elif call.name == "scaler.step":
            behind = next((each for each in calls[place + 1 : place + 3] if each.name != "scaler.unscale_"), None)
            if behind is None or behind.name != "step":
                found.add(place)
    return found


def _find_by_hand(calls: Sequence[Call]) -> list[Update]:
    """Make an update of each step with a backward pass; the last one may be unfinished, and is left out."""
    steps = gather((call.step, call) for call in calls)
    groups = [group for _, group in sorted(steps.items()) if any(call.name == "backward" for call in group)]
    return [Update(BY_HAND, group[-1], tuple(group), place == 0) for place, group in enumerate(groups[:-1])]


def by_optimizer(updates: Iterable[Update]) -> dict[str, list[Update]]:
    """The updates of each optimizer."""
    return gather((update.optimizer, update) for update in updates)


def clears(call: Call, optimizer: str, made: Mapping[str, OptimizerMade]) -> bool:
    """Check whether a call of ``zero_grad`` clears all gradients that an optimizer reads."""
    if call.name != "zero_grad":
        return False
    if call.about == optimizer or call.about in ("", "self") or optimizer not in made:
        return True
    names = made[optimizer].parameters
    return bool(names) and all(is_within(name, call.about) for name in names)


def list_cleared_passes(update: Update, made: Mapping[str, OptimizerMade]) -> list[Call]:
    """Backward passes that are followed by clearing before any update, from the line of the one that is used."""
    passes = update.named("backward")
    kept = {call.line for call in passes[-1:]}
    found, since = [], []
    for call in update.before:
        if call.name == "backward":
            since.append(call)
        elif call.name in ("step", "scaler.step"):  # another optimizer has used them
            since = []
        elif clears(call, update.optimizer, made):
            found.extend(since)
            since = []
    return [call for call in found if call.line in kept and call is not passes[-1]]


def count_passes(updates: Iterable[Update]) -> int:
    """Backward passes of an update, as most have."""
    counted = Counter(len(update.named("backward")) for update in updates)
    return counted.most_common(1)[0][0] if counted else 0


def is_within(parameter: str, module: str) -> bool:
    """Check whether ``blocks.3.fc:weight`` is of the module ``blocks``."""
    return parameter.startswith((f"{module}.", f"{module}:"))
