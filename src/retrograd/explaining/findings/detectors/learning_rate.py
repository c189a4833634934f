"""Learning rates that are too high or too low, and parameters that no update changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from retrograd.core.amounts import list_names
from retrograd.core.history.facts import OptimizerMade
from retrograd.core.runs.findings import Evidence, Finding
from retrograd.explaining.findings.births import Births
from retrograd.explaining.findings.detector import Detector, Words
from retrograd.explaining.findings.detectors.units import DEAD, list_dead
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import MOVED, ROSE, Training, is_adaptive
from retrograd.explaining.findings.update_norms import Stillness, UpdateNorms

LARGE = 0.1
"""‖Δw‖ / ‖w‖ of a step beyond which it may have thrown training off; 1e-3 is usual."""

HUGE = 0.5
"""‖Δw‖ / ‖w‖ beyond which it is said without a rise where the loss is none the better."""

LARGE_LOSS = 1000.0
"""A loss that is so large before any update has large gradients by itself: its scale may be what is wrong."""

LASTED = 3
"""Steps at which the loss is up, or updates are large, that it takes to be more than a single bad batch."""

MINUTE = 1e-2
"""Share of their norm by which weights have moved in a whole run, when it has hardly begun to train."""

SMALL = {False: 1e-4, True: 5e-6}
"""Learning rates below which a run is not likely to train: plain, and of optimizers that divide by the gradient."""

FEWEST = 5
"""Updates that it takes to say that they leave a parameter as it is."""

PUT_BACK = 3
"""Looks at a parameter, each behind an update that changed it, that it takes to say that it is put back."""


class LearningRateTooHigh(Detector):
    """Steps so large that they throw the weights about."""

    slug = "learning-rate-too-high"
    is_of_losses = True
    words = Words(
        says="The updates are so large that the loss goes up by them and does not come back.",
        example="The learning rate of 30 is too high: at step 1 an update changed the weights by 53 times their "
        "norm, the loss rose from 0.652 to 3.6e+08 and ended at 6.33.",
        threshold=f"‖Δw‖/‖w‖ > {LARGE:g} just before the loss is {ROSE:g} times what it was (1.5 times where that is "
        f"6 times its noise), or not finite, or before most units of a layer die; and it ends above {MOVED:g} of "
        f"what it was. Or ‖Δw‖/‖w‖ > {HUGE:g}, and it ends no lower, or above half of it where it was 10 times as "
        "high for 5 steps.",
        source="SageMaker Debugger and practice hold 1e-3 to be usual; 0.1 and 3 are measured by us: 34 healthy runs "
        "stay below one of the two.",
        guard="A loss that has come back is none; nor is one that rose after a usual update (then it was the data).",
        repair="Divide the learning rate by 10, or warm it up.",
    )
    explains = (
        "diverged", "loss-spike", "loss-flat", "loss-noisy", "dead-units", "saturated", "vanishing",
        "attention-collapse", "not-updated", "learning-rate-too-low", "underflow", "overflow-headroom", "scaler-churn",
        "bf16-update-lost", "nan-forward", "nan-backward", "nan-update", "momentum",
    )  # fmt: skip

    def check(self, record: Record) -> Iterator[Finding]:
        """Look for a rise of the loss behind a large update."""
        training = record.once(Training)
        training.need_loss(4)
        updates = training.updates
        before = baseline(record, updates)
        rise = self._find_rise(record, before)
        since = rise or self._find_death(record)
        first = None if since is None or training.late < MOVED * before else largest_before(updates, since)
        checked = [
            "units of a layer that lived before have been dead since" if rise is None else "the loss rose after it"
        ]
        checked.append(f"the loss does not end below {MOVED:g} of what it was before")
        if first is None:
            first = self._find_huge(record, before)
            checked = [f"several updates were of {HUGE:g} times the norm of the weights or more"]
        if first is not None:
            yield self._tell(record, *first, before, checked)

    @staticmethod
    def _find_rise(record: Record, before: float) -> int | None:
        """The first step after a large update at which the loss is far above what it was, if that lasted."""
        training = record.once(Training)
        steps, loss = training.loss
        since = first_large(training.updates)
        if since is None or not before > 0:
            return None
        bound = min(ROSE * before, max(1.5 * before, before + 6 * np.nan_to_num(training.noise, nan=np.inf)))
        is_up = np.isfinite(loss) & (loss >= bound) if record.once(Births).is_sudden else ~(loss < bound)
        risen = np.flatnonzero(is_up & (steps > since))
        lasted = max(len(risen), int((training.updates.finite_ratio > LARGE).sum())) * training.stride
        return int(steps[risen[0]]) if len(risen) and lasted >= LASTED else None

    @staticmethod
    def _find_huge(record: Record, before: float) -> tuple[int, float] | None:
        """An update of half of the weights or more, and a loss that is none the better, or was far up for long."""
        training, updates = record.once(Training), record.once(Training).updates
        place = np.flatnonzero(updates.finite_ratio >= HUGE)
        up = int((training.loss.values > 10 * before).sum()) * training.stride
        no_better = training.late >= before or (up >= 5 and training.late >= 0.5 * before)
        if len(place) * training.stride < 2 or not no_better or len(training.loss.values) < 10 or before <= 0:
            return None
        return int(updates.steps[place[0]]), float(updates.finite_ratio[place].max())

    @staticmethod
    def _find_death(record: Record) -> int | None:
        """The step since which most units of a layer have been dead, if they lived before."""
        found = [dead for dead in record.once(list_dead) if dead.share > DEAD and dead.since > record.steps[0]]
        return min((dead.since for dead in found), default=None)

    def _tell(self, record: Record, step: int, ratio: float, before: float, checked: list[str]) -> Finding:
        training = record.once(Training)
        loss, late, rate = training.loss.values, training.late, training.rates.get(step, training.rate)
        finite = loss[np.isfinite(loss)]
        named = "The learning rate" if rate is None else f"The learning rate of {rate:.3g}"
        rise = f"the loss rose from {before:.3g} to {finite.max():.3g}"
        rise = rise if finite.max() > ROSE / 2 * before else f"the loss was {before:.3g} before"
        end = f"ended at {late:.3g}" if np.isfinite(late) else "is no longer finite"
        is_large = before >= LARGE_LOSS
        meant = f" for a loss of {before:.3g}" if is_large else ""
        return self.find(
            "critical",
            f"{named} is too high{meant}: at step {step} an update changed the weights by {ratio:.2g} times their "
            f"norm, {rise} and {end}.",
            step=step,
            last_step=record.last_step,
            line=record.optimizer_line,
            evidence=[
                Evidence("‖Δw‖/‖w‖", ratio, f"> {LARGE:g}"),
                Evidence("loss before", before),
                Evidence("largest finite loss", float(finite.max()), f"> {ROSE:g} × before, or > 1.5 × and 6 × noise"),
                Evidence("loss at the end", late, f"not < {MOVED:g} × before"),
            ],
            precondition=checked,
            repair=f"Look why the loss is so large; its gradients are, too. {self.words.repair}" if is_large else "",
            refute="with a tenth of the learning rate the loss rises all the same",
        )


def first_large(updates: UpdateNorms) -> int | None:
    """The step of the first large update."""
    large = updates.steps[updates.finite_ratio > LARGE]
    return int(large[0]) if len(large) else None


def baseline(record: Record, updates: UpdateNorms) -> float:
    """The loss before the first large update: the median of those so far, or the first one."""
    steps, loss = record.once(Training).loss
    first = first_large(updates)
    until = loss if first is None else loss[: np.searchsorted(steps, first, "right")]
    until = until[np.isfinite(until)][-20:]
    return float(np.median(until)) if len(until) else float("nan")


def largest_before(updates: UpdateNorms, step: int) -> tuple[int, float] | None:
    """The first large update of the stretch of them that ends before a step: its step, and ‖Δw‖/‖w‖ of the largest."""
    before = np.flatnonzero((updates.steps < step) & (updates.steps >= step - 20))
    ratio = updates.finite_ratio[before]
    large = before[ratio > LARGE]
    if not len(large):
        return None
    return int(updates.steps[large[0]]), float(ratio.max())


class LearningRateTooLow(Detector):
    """Steps so small that nothing comes of them."""

    slug = "learning-rate-too-low"
    is_of_losses = True
    words = Words(
        says="All updates together have hardly moved the weights, and it is the learning rate that is so small.",
        example="The learning rate of 1e-08 is too low: 100 updates moved the weights by 6e-06 of their norm in all, "
        "and the loss stayed at 0.686.",
        threshold=f"Σ ‖Δw‖/‖w‖ < {MINUTE:g} over at least 20 steps, with a rate below 1e-4 (5e-6 for Adam and its "
        "kin).",
        source="SageMaker Debugger warns of a ratio below 1e-8; the sum is measured by us: 34 healthy runs are above "
        "0.008 with a rate of 2e-5.",
        guard="A loss that falls, gradients that are small themselves, and a rate that is warmed up are none.",
        repair="Multiply the learning rate by 100 and look where the loss begins to fall.",
    )
    explains = ("loss-flat", "not-updated", "bf16-update-lost", "clip-always-on")

    def check(self, record: Record) -> Iterator[Finding]:
        """Add up what the weights moved."""
        training = record.once(Training)
        training.need_loss(5)
        updates = training.updates
        rate = training.rate
        if rate is None:
            raise CannotTell("no learning rate was recorded")
        moved = float(np.nansum(updates.ratio)) * training.stride
        skipped = len(training.loss.steps) * training.stride < 20 or training.fell or not moved < MINUTE
        if skipped or rate == 0 or rate >= SMALL[is_adaptive(training.optimizer)] or _warms_up(training.rates):
            return
        yield self.find(
            "warning",
            f"The learning rate of {rate:.2g} is too low: {len(updates.steps)} updates moved the weights by "
            f"{moved:.1g} of their norm in all, and the loss stayed at {training.late:.3g}.",
            step=int(updates.steps[0]),
            last_step=record.last_step,
            line=record.optimizer_line,
            evidence=[
                Evidence("Σ ‖Δw‖/‖w‖", moved, f"< {MINUTE:g}"),
                Evidence("learning rate", rate, f"< {SMALL[is_adaptive(training.optimizer)]:g}"),
                Evidence("loss at first", training.early),
                Evidence("loss at the end", training.late, "has not fallen by a tenth"),
            ],
            precondition=["the loss has not fallen", "the learning rate is not being warmed up"],
            refute="with 100 times the learning rate the loss does not fall either",
        )


def _warms_up(rates: dict[int, float]) -> bool:
    told = [rates[step] for step in sorted(rates)]
    return len(told) > 1 and told[-1] > 2 * told[0]


class NotUpdated(Detector):
    """Parameters that updates leave as they are, though they have a gradient."""

    slug = "not-updated"
    words = Words(
        says="An optimizer steps and a parameter has a gradient, but the parameter stays as it is.",
        example="blocks.2:weight has a gradient and an update at each of 80 steps, and has not changed.",
        threshold=f"Δw = 0 at all of at least {FEWEST} updates at which the gradient is not zero; or Δw is not, and "
        f"the values are bit for bit the same at {PUT_BACK} looks, each behind an update, as they were before.",
        source="SageMaker Debugger's UnchangedTensor; TrainCheck (MPS addcmul_, Accelerate #2665).",
        guard="Rates of zero, updates that were skipped, and runs in which nothing is updated are left to others.",
        repair="Look for what writes old values back (a copy, load_state_dict); where updates are 0, for what takes "
        "the gradient away within optimizer.step(): a hook, or the step itself.",
    )
    explains = ("loss-flat",)

    def check(self, record: Record) -> Iterator[Finding]:
        """Look for updates of zero beside gradients."""
        if len(record.optimizers) > 1 or record.once(Training).is_contest:
            raise CannotTell("several optimizers update in turn, each with gradients that the others leave")
        found = record.once(Stillness).find_still(FEWEST)
        stuck = {name: often for name, often in found.items() if not self._is_meant(record, name)}
        put_back = self._find_put_back(record)
        if put_back:
            yield self._tell_put_back(record, put_back)
        elif stuck:
            yield self._tell(record, list(stuck), min(stuck.values()))

    def _is_meant(self, record: Record, name: str) -> bool:
        groups = [group for _, group in record.once(Training).groups() if name in group.get("parameters", ())]
        return any(group.get("lr") == 0 for group in groups)

    def _tell(self, record: Record, names: list[str], steps: int) -> Finding:
        verb = "have gradients and" if len(names) > 1 else "has a gradient and"
        return self.find(
            "warning",
            f"{list_names(names, 1)} {verb} an update at each of {steps} steps, and did not change.",
            site=names[0],
            step=int(record.once(Training).updates.steps[0]),
            last_step=record.last_step,
            line=record.line_of(names[0]) or record.optimizer_line,
            evidence=[Evidence("updates of zero with a gradient that is not", steps, f"≥ {FEWEST}, all of them")],
            precondition=["other parameters were changed", "the learning rate of its group is not zero"],
            refute="its values differ between two steps",
            repair="Look at hooks of the optimizer, and at its step: there the gradient, or the update, is taken away.",
        )

    @staticmethod
    def _find_put_back(record: Record) -> list[str]:
        """Parameters that updates change, and that are bit for bit the same at all looks from the first update on.

        A look is taken before the update of its step, and counts if an update came between it and the look before.
        """
        updates = record.once(Training).updates
        told = {str(site.value): line for line, site in enumerate(updates.sites) if updates.told[line] >= FEWEST}
        first = record.first_rank
        if record.is_staged:  # a whole model beside the stages has parameters that only other ranks train
            trained = {name for made in record.of(OptimizerMade) if made.rank == first for name in made.parameters}
            told = {name: line for name, line in told.items() if name in trained}
        found = []
        for name, listed in record.looks.items():
            looks = {look.step: look.digest for look in listed if look.digest and look.rank == first}
            steps = sorted(looks)
            last = {looks[step] for step in steps[-PUT_BACK - 1 :]}
            if name not in told or len(steps) <= PUT_BACK or len(last) > 1:
                continue
            behind = np.flatnonzero(updates.tell_spans(told[name], steps)) + 1
            if len(behind) >= PUT_BACK and len({looks[step] for step in steps[behind[0] - 1 :]}) == 1:
                found.append(name)
        return found

    def _tell_put_back(self, record: Record, names: list[str]) -> Finding:
        return self.find(
            "critical",
            f"{list_names(names, 1)} are changed by each update and are the same again at the next step: something "
            "writes old values back.",
            site=names[0],
            step=int(record.once(Training).updates.steps[0]),
            last_step=record.last_step,
            line=record.line_of(names[0]),
            evidence=[
                Evidence(
                    "parameters that are the same behind updates", len(names), f"bit for bit, at ≥ {PUT_BACK} looks"
                )
            ],
            precondition=["their updates are not zero"],
            refute="their values differ between two steps",
            repair="Look for what writes old values back behind the update: a copy, load_state_dict, an average.",
        )
