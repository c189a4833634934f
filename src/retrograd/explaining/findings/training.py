"""The losses, rates and updates of a run."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.core.amounts import count_of
from retrograd.core.history.arrays import read_numbers
from retrograd.core.history.facts import OptimizerMade
from retrograd.core.history.steps import number_steps
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.stretches import list_parts
from retrograd.explaining.findings.update_norms import UpdateNorms
from retrograd.explaining.findings.updates import Update, by_optimizer

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MOVED = 0.9
"""A loss that is above this share of what it was at first has not fallen."""

ROSE = 3.0
"""A loss that is so many times what it was has been thrown off, or has diverged."""

OFTEN = 0.1
"""Share of the updates of each part that come behind a pass of its own, where several are trained in turn."""

_ADAPTIVE = ("ada", "rmsprop", "rprop", "lion", "lamb", "muon")


class Training:
    """Losses, rates and updates of a record.

    Args:
        record: what it reads.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self.loss = record.loss

    @property
    def parts(self) -> list[Record]:
        """The records of the stretches in which other parameters are trained; of one stretch alone, the record."""
        return self._record.once(list_parts)

    # ---- losses ----

    def need_loss(self, least: int = 1) -> None:
        """Make sure that there is a loss to speak of.

        Raises:
            CannotTell: there is none, too few, or models that train against each other, in turn, or in succession.
        """
        if len(self.parts) > 1:
            raise CannotTell("several models were trained one after the other, each by losses of its own")
        if self._record.is_mixed or self.parts[0].is_mixed:
            raise CannotTell("several models are trained in turn, and the losses of each are not told apart")
        if len(self.loss.values) < least:
            raise CannotTell(
                f"{count_of(len(self.loss.values), 'loss was', 'losses were')} recorded, and it takes {least}"
            )
        if self.is_contest:
            raise CannotTell("several models are trained by several optimizers, and no loss need fall")

    @cached_property
    def lost(self) -> int | None:
        """The first step at which the loss is not finite; None where there is none."""
        steps = self.loss.steps[~np.isfinite(self.loss.values)]
        return int(steps[0]) if len(steps) else None

    @cached_property
    def initial(self) -> float:
        """The loss before training: the first one that is finite; NaN where there is none."""
        finite = np.isfinite(self.loss.values)
        return float(self.loss.values[finite.argmax()]) if finite.any() else np.nan

    @cached_property
    def lowest(self) -> float:
        """The lowest loss that is finite; NaN where there is none."""
        finite = np.isfinite(self.loss.values)
        return float(self.loss.values.min(where=finite, initial=np.inf)) if finite.any() else np.nan

    @cached_property
    def early(self) -> float:
        """The median of the first tenth of the losses, at least three."""
        head = self.loss.values[: max(3, len(self.loss.values) // 10)]
        return _median(head)

    @cached_property
    def late(self) -> float:
        """The median of the last fifth of the losses, at least three; NaN where one is not finite."""
        return _median(self.loss.values[-max(3, len(self.loss.values) // 5) :])

    @cached_property
    def stride(self) -> int:
        """Steps from one recorded loss to the next."""
        gaps = np.diff(self.loss.steps)
        return int(np.median(gaps, overwrite_input=True)) if len(gaps) else 1

    @cached_property
    def noise(self) -> float:
        """Robust standard deviation of a loss from its neighbours; NaN for fewer than three."""
        finite = np.isfinite(self.loss.values)
        steps = np.diff(self.loss.values if finite.all() else self.loss.values[finite])
        swing = np.median(np.abs(steps, out=steps), overwrite_input=True) if len(steps) > 1 else np.nan
        return float(1.4826 * swing / np.sqrt(2))

    @property
    def fell(self) -> bool:
        """True if the loss ended clearly lower than it began: by a tenth, and by more than its noise.

        Where several models were trained one after the other, if that of one of them did.
        """
        if len(self.parts) > 1:
            return any(part.once(Training).fell for part in self.parts)
        start = min(self.initial, self.early)
        return bool(self.late < start - max((1 - MOVED) * abs(start), self.noise if self.noise > 0 else 0.0))

    @cached_property
    def is_contest(self) -> bool:
        """True if parts are updated in turn, each behind a pass of its own, as in a GAN, so that no loss need fall."""
        if self._takes_turns():
            return True
        roots = {site.path.partition(".")[0] for site in self._record.of_kind("parameter", "update")}
        if len(roots & self._record.root_names) < 2:
            return False
        updates, different = 0, np.empty(0, np.int64)
        for piece in self._record.history.all_events.pieces(["step"], ["update"]):
            updates += piece.num_rows
            different, _ = number_steps(np.concatenate((different, read_numbers(piece["step"]))))
        return updates > 1.5 * max(len(different), 1)

    def _takes_turns(self) -> bool:
        """Check whether each optimizer is stepped, often enough, behind a pass that came after the step of another."""
        held = {name: set(made.parameters) for name, made in self._record.optimizers.items()}
        if len(held) < 2 or any(one & other for one, other in itertools.combinations(held.values(), 2)):
            return False
        return all(
            sum(map(_follows_another, updates)) > OFTEN * len(updates)
            for updates in by_optimizer(self._record.updates).values()
        )

    # ---- rates ----

    @cached_property
    def rates(self) -> dict[int, float]:
        """The largest learning rate of each step, as it was told; empty where it was not."""
        told: dict[int, float] = {}
        for call in self._record.calls:
            if call.name == "step":
                rates = [float(each) for each in as_list(call.details.get("lr")) if is_number(each)]
                told[call.step] = max([told.get(call.step, 0.0), *rates])
        return told

    @property
    def rate(self) -> float | None:
        """The largest learning rate of all groups at the first update; None where it was not told."""
        made = [number(group.get("lr")) for _, group in self.groups()]
        listed = [self.rates[min(self.rates)]] if self.rates else [each for each in made if each is not None]
        return max(listed) if listed else None

    def groups(self) -> list[tuple[str, dict[str, Any]]]:
        """The groups of all optimizers as they were at first: name of the optimizer, hyper-parameters."""
        first = {made.name: made for made in reversed(self._record.of(OptimizerMade))}
        return [(name, dict(group)) for name, made in first.items() for group in made.groups]

    @property
    def optimizer(self) -> str:
        """Class of the optimizer that updated first: ``Adam``; empty where none did."""
        if self._record.optimizers:
            made = next(iter(self._record.optimizers.values()))
            return made.type or made.name  # a run of an older version has the name alone
        updates = self._record.history.all_events.pieces(["name"], ["update"])
        return next((str(piece["name"][0]) for piece in updates if piece.num_rows), "")

    # ---- updates ----

    @cached_property
    def updates(self) -> UpdateNorms:
        """Changes of parameters by optimizers in training.

        Raises:
            CannotTell: no update was recorded.
        """
        return self._record.once(UpdateNorms)


def _follows_another(update: Update) -> bool:
    """Check whether a backward pass came between the step of another optimizer and this update."""
    names = [call.name for call in update.before if call.name in ("backward", "step")]
    return "backward" in names[names.index("step") :] if "step" in names else False


def is_adaptive(optimizer: str) -> bool:
    """Check by its class whether an optimizer makes updates whose size does not depend on that of the gradients."""
    return any(name in optimizer.lower() for name in _ADAPTIVE)


def as_list(value: Any) -> list[Any]:
    """A value, or several, as a list; none for None."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def is_number(value: Any) -> bool:
    """Check whether it is a plain number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: Any) -> float | None:
    """A plain number; None for anything else."""
    return float(value) if is_number(value) else None


def _median(values: FloatArray) -> float:
    return float(np.median(values)) if len(values) and np.isfinite(values).all() else np.nan
