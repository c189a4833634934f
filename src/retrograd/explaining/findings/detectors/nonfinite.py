"""Numbers that are not finite: where the first one was born, and why; and points without a derivative."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np

from retrograd.core.amounts import count_of
from retrograd.core.groups import gather
from retrograd.core.history.facts import Kink
from retrograd.core.runs.findings import Evidence, Finding, Severity
from retrograd.explaining.findings.births import GREW, Birth, Births
from retrograd.explaining.findings.detector import Detector, Words
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import Training

_FOLLOWING = (
    "diverged", "loss-spike", "loss-flat", "not-updated", "dead-units", "saturated", "vanishing",
    "exploding", "underflow", "scaler-churn", "bf16-update-lost", "learning-rate-too-high",
    "learning-rate-too-low", "attention-collapse", "nan-input", "nan-forward", "nan-backward", "nan-update", "failed",
    "momentum", "adam-epsilon", "batch-norm", "clip-always-on", "scheduler-per-step", "lr-zero",
    "lr-jump", "*",
)  # fmt: skip
"""Symptoms of numbers that are not finite."""

_SOURCE = "exact: numbers are counted, and operands are looked at in the step that fails"
_GUARD = (
    "Masks of −inf, and what is masked before it reaches the loss or a weight, are none; nor are gradients whose "
    "update loss scaling has skipped."
)

_REPAIRS = {
    "is 0 in float16": "give the optimizer an eps that float16 holds, as 1e-4, or keep the weights in float32",
    "whose eps is 0": "give the optimizer an eps above 0",
    "log of 0": "add a small number inside of the log, or use log_softmax, logsigmoid or xlogy",
    "below 0": "keep the argument of the log above 0: clamp(min=eps)",
    "that requires grad": "where it is a parameter, look at its gradient and its update in the step before (sqrt, pow, "
    "log and division in the loss; the learning rate); where it is an input, look how it is made",
    "0 · ": "mask with a finite number, as −1e4, or set what is infinite to 0 in front of the product (masked_fill)",
    "ctc_loss of": "give longer inputs, leave such samples out, or take ctc_loss(zero_infinity=True)",
    "sqrt of": "keep the argument of the root above 0, in front of it: clamp(min=eps)",
    "rsqrt of": "keep the argument of the root above 0: clamp(min=eps)",
    "0 / 0": "add a small number to the divisor, or leave out what has nothing to be divided by",
    "division by 0": "add a small number to the divisor, or clamp it",
    "power": "keep the base above 0: clamp(min=eps)",
    "exp": "subtract the largest before exp, or use softmax, logsumexp, softplus",
    "all −inf": "leave at least one key of each row unmasked, or set such rows to 0 after the softmax",
    "one element": "take std(correction=0), or leave batches of one element out (drop_last=True)",
    "ignored": "leave out batches without targets, or use reduction='sum' and divide by max(count, 1)",
    "±1": "clamp the argument to −1 + eps … 1 − eps",
    "float16": "use bfloat16, or compute this in float32",
    "infinite at": "keep the argument away from there, also where `where` or a mask hides the result: clamp(min=eps)",
    "eps is 0": "give the norm an eps above 0",
}


_BESIDE = (
    "Look how that tensor is made (a target, a weight, a return, a mask): of missing values, 0 / 0, or the standard "
    "deviation of one element."
)
"""Repair for a tensor that comes in, and not as an input of the model."""


def _make_words(says: str, example: str, repair: str, threshold: str = "One element.") -> Words:
    return Words(says=says, example=example, threshold=threshold, source=_SOURCE, guard=_GUARD, repair=repair)


class _Born(Detector):
    """A birth of one kind.

    Attributes:
        born: that of :class:`Birth`.
        sentence: the message, without reason and growth.
        guess: what names the operation where only the order of sites tells of it.
    """

    born: ClassVar[str]
    sentence: ClassVar[str]
    guess: ClassVar[str] = ", by `{}` it seems"
    explains = _FOLLOWING

    def check(self, record: Record) -> Iterator[Finding]:
        """Find the first origin."""
        births = record.once(Births)
        birth = births.first
        if birth is not None and birth.born == self.born:
            yield self._tell(record, births, birth)

    def _tell(self, record: Record, births: Births, birth: Birth) -> Finding:
        lost = record.once(Training).lost
        said = self._choose(birth).format(
            what=birth.made or "NaN or infinity",
            how=_how_it_came_in(birth),
            where=_where(birth),
            site=birth.site or "a parameter",
            step=birth.step,
            operation=birth.operation,
        )
        reason = f": {birth.reason}" if birth.reason else ""
        growth = ", after numbers had grown" if births.growth >= 1 else ""
        is_known = birth.reason if not birth.is_seen else birth.is_certain or birth.born != "backward"
        guess = "" if is_known or not birth.operation else self.guess.format(birth.operation)
        if not birth.is_seen and birth.noted not in (None, birth.step):
            guess += f", as operations were at step {birth.noted}"
        return self.find(
            self._weigh(record, births, birth),
            f"{said}{guess}{reason}{growth}",
            site=birth.site,
            step=birth.step,
            last_step=record.last_step,
            rank=birth.rank,
            line=birth.line,
            evidence=list(_list_evidence(births, birth, lost)) or [Evidence("step", birth.step)],
            precondition=_list_checks(birth),
            refute="the operation, run on these operands alone, gives what is finite",
            repair=_BESIDE if birth.is_beside else _find_repair(birth, self.words.repair),
        )

    def _choose(self, birth: Birth) -> str:
        return self.sentence

    @staticmethod
    def _weigh(record: Record, births: Births, birth: Birth) -> Severity:
        """Training that goes on with a finite loss has got over it; of what came to no weight and no loss take note."""
        if birth.born == "backward" and not birth.is_seen and not birth.reached:
            return "note"
        values = record.loss.values
        is_trained = bool(record.of_kind("parameter", "update"))
        is_over = len(values) > 0 and bool(np.isfinite(values).all()) and not births.are_weights_bad(record.last_step)
        return "warning" if is_trained and is_over else "critical"


def _list_checks(birth: Birth) -> list[str]:
    """What was checked of this birth, and how."""
    if birth.is_watched and birth.is_seen:
        how = f"each operation of step {birth.step} was watched as it ran"
    elif birth.is_seen:
        how = f"the graph of step {birth.step} was searched for it"
    elif birth.seen_at:
        how = f"of what was recorded at step {birth.step}, {birth.seen_at} is the first that is not finite"
    else:
        how = "no recorded site has a number that is not finite"
    is_of_look = birth.is_seen and birth.noted is not None
    line = f"its line was noted at step {birth.noted}, whose graph has the same nodes up to there" if is_of_look else ""
    return [each for each in (how, line, birth.reached) if each]


def _list_evidence(births: Births, birth: Birth, lost: int | None) -> Iterator[Evidence]:
    """List the operands, where the birth shows, and what came before it; ``lost`` is the first step without a loss."""
    for name, each in birth.operands.items():
        yield Evidence(f"{birth.operation or 'operand'}: {name}", str(each))
    if birth.seen_at:
        yield Evidence("first shown at", birth.seen_at)
    if lost is not None:
        yield Evidence("first loss that is not finite, at step", lost)
    if births.growth >= 1:
        yield Evidence("growth before", births.growth * GREW, f"> {GREW:g}")


def _find_repair(birth: Birth, usual: str) -> str:
    for words, repair in _REPAIRS.items():
        if words in birth.reason:
            return f"{repair[0].upper()}{repair[1:]}."
    return usual


def _how_it_came_in(birth: Birth) -> str:
    return " beside the model's inputs, which are finite," if birth.is_beside else ""


def _where(birth: Birth) -> str:
    if birth.is_beside and birth.operation:
        return f", in what `{birth.operation}` takes"
    if birth.is_behind:
        return f" between {birth.site} and the loss"
    if birth.born == "input":
        return f", first seen in {birth.site}" if birth.site else ""
    if birth.born == "forward" and birth.seen_at and not birth.is_seen and not birth.operation and not birth.reason:
        return f" in {birth.site}, or before it" if birth.site else ""
    return f" in {birth.site}" if birth.site else " between the model's output and the loss" if birth.is_outside else ""


class NanInput(_Born):
    """Data that are not finite."""

    slug = "nan-input"
    born = "input"
    sentence = "{what} comes in{how} at step {step}{where}"
    words = _make_words(
        says="What comes into the model, or the target, is not finite.",
        example="NaN comes in at step 5, first seen in fc: what came in was not finite before: min -1.2, "
        "max 2.3, 1 of 24 are NaN",
        repair="Look at the data of this step, and at what is made of them before the model (0 / 0, the standard "
        "deviation of one element); drop or fill what is missing (torch.nan_to_num).",
    )


class NanForward(_Born):
    """An operation of the forward that makes it."""

    slug = "nan-forward"
    born = "forward"
    sentence = "{what} is made{where}, step {step}"
    words = _make_words(
        says="An operation of the forward makes a number that is not finite of numbers that are.",
        example="NaN is made in block.att, step 312: softmax over a row that is all −inf (train.py:48)",
        repair="Keep the operands of this operation where it is defined.",
        threshold="One element that reaches the loss.",
    )

    def _choose(self, birth: Birth) -> str:
        is_open = birth.is_seen and not birth.is_certain and birth.operation
        return "{what} is made by `{operation}`{where}, or comes in there, step {step}" if is_open else self.sentence


class NanBackward(_Born):
    """A derivative that is not finite."""

    slug = "nan-backward"
    born = "backward"
    sentence = "The gradient becomes {what}{where}, step {step}"
    words = _make_words(
        says="The loss is finite, and a derivative is not.",
        example="The gradient becomes NaN in head, step 5: the derivative of sqrt is infinite at 0 (train.py:48)",
        repair="Look at sqrt, pow, log and division by small numbers between this place and the loss: keep "
        "their arguments, also where the result is hidden, where the derivative is finite: clamp(min=eps).",
        threshold="One element that reaches a weight.",
    )


class NanUpdate(_Born):
    """An update that makes it of finite gradients."""

    slug = "nan-update"
    born = "update"
    sentence = "{site} becomes {what} at step {step}"
    guess = ", by `{}`, or by what is written by hand to it or to its gradient"
    words = _make_words(
        says="Gradients are finite, and a parameter is not, after the update.",
        example="fc:weight becomes NaN at step 5: 0 / 0 in RMSprop, whose eps is 0 (train.py:60)",
        repair="Look at the learning rate, at eps, and at what is written by hand: to parameters, or to .grad behind "
        "backward.",
    )

    def _choose(self, birth: Birth) -> str:
        is_found = birth.is_seen and "not finite before" in birth.reason  # by the forward: updates were looked at
        return (
            "{site} holds {what} when step {step} begins, and no optimizer has written it"
            if is_found
            else self.sentence
        )


# ---- points without a derivative ----

UNUSUAL_SHARE = 0.5
"""Share of the elements, at a kink that is not usual. Max-pooling of images with a plain background has ties in a third
of its windows."""
_MEANT = "see whether so many elements are meant to lie there: their gradient is torch's choice."

LEAST_LOOKS = 2
"""Steps at which that many lay there, of those that were looked at."""

Place = tuple[str, str, str, str, str]


class KinksInBackward(Detector):
    """Reports where gradients come from points at which a function has none."""

    slug = "kinks"
    words = Words(
        says="The inputs of an operation lie where it has no derivative: the gradient there is infinite or NaN, or made"
        " by a rule of torch's for most elements.",
        example="sqrt is called at 0 for 3 of 64 elements in encoder, where torch gives ∞ for a gradient",
        threshold="one element where torch gives no number; half of all elements otherwise, at two looks",
        source="torch's note on functions without gradient, measured in docs/kinks.md; the share is ours",
        guard="seen in the graph of the loss, between a forward and its backward; what every model has, such as zeros"
        " in front of a ReLU, is left out",
        repair="keep the argument away from that point: add a small ε under a root or a logarithm, or use"
        " torch.linalg.vector_norm for a norm",
    )

    def check(self, record: Record) -> Iterable[Finding]:
        """Check kinks, which are seen only where a program is run to be explained."""
        facts = record.of(Kink)
        if not facts:
            raise CannotTell("points without a derivative are looked at by `retrograd explain SCRIPT` alone")
        places = (((each.name, each.operation, each.where, each.node, each.line), each) for each in facts)
        return self._judge(gather(places))

    def _judge(self, places: dict[Place, list[Kink]]) -> Iterator[Finding]:
        for kinks in places.values():
            first = kinks[0]
            if not first.finite:
                yield self._tell(kinks, "where torch gives {0.gives} for a gradient", "not finite")
            elif not first.is_usual and _is_crowded(kinks):
                rule = "where torch gives {0.gives}: {0.convention}"
                yield self._tell(kinks, rule, f"share > {UNUSUAL_SHARE} at {LEAST_LOOKS} looks")

    def _tell(self, kinks: list[Kink], rule: str, threshold: str) -> Finding:
        first = kinks[0]
        inside = f" in {first.name}" if first.name else ""
        message = (
            f"{first.operation} is called {first.where} for {int(first.value):,} of "
            f"{count_of(first.total, 'element')}{inside}, {rule.format(first)}"
        )
        return self.find(
            "note",
            message,
            site=first.name,
            step=first.step,
            last_step=kinks[-1].step,
            line=first.line,
            evidence=[
                Evidence("gives", first.gives, threshold if not first.finite else ""),
                Evidence("share of elements", first.value / first.total, threshold if first.finite else ""),
                Evidence("looks at which it was so", len({each.step for each in kinks})),
            ],
            precondition=["its node is in the graph of the loss"],
            refute="a finite gradient of everything in front of it, at that step: then what is given is masked later",
            repair=_MEANT if first.finite else "",
        )


def _is_crowded(kinks: list[Kink]) -> bool:
    crowded = {each.step for each in kinks if each.value > UNUSUAL_SHARE * each.total}
    return len(crowded) >= LEAST_LOOKS
