"""Outputs that do not tell samples apart, and inputs of evaluation that are none of those that were trained on."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from retrograd.core.groups import gather
from retrograd.core.history.data_facts import AttendedTokens, Spread
from retrograd.core.history.facts import Input, Operation, Units
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.axes import ATTENTION, AxisTable, axes_of, find_contractions
from retrograd.explaining.findings.chain import VIEWS, Chain, is_float, is_mask, name_of
from retrograd.explaining.findings.detectors.inputs import is_taken_as_it_is
from retrograd.explaining.findings.entry import Entry, Family, first_operation
from retrograd.explaining.findings.record import CannotTell, Record

family = Family(__name__)

LOOKS = 4
"""Looks at outputs that it takes, at least."""

NONE = 1e-12
"""Spread below which samples differ by rounding alone."""

SOME = 1e-4
"""Spread from which on inputs differ."""

COLLAPSED = 1e-3
"""Spread below which outputs are called collapsed where a gradient is stopped; our own choice."""

FELL = 5.0
"""How many times smaller it must have become where nothing keeps samples apart; our own choice."""

FELL_FAR = 100.0
"""The same where a gradient is stopped, which may keep them apart."""

OTHER = 10.0
"""How many times another scale, or how many standard deviations another mean, inputs have; our own choice."""

_COMPARES = ("sub", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cosine_similarity", "pairwise_distance",
             "mul")  # fmt: skip
_TELLS_APART = re.compile(
    "matmul|mm$|einsum|cdist|^log|softmax|cross_entropy|nll|^var|^std|cov|exp|margin|embedding|softplus|clamp|relu|max|min"
    "|sigmoid|kl_div|cholesky|linalg|inverse|det$|svd|qr|gather|eye"
)
"""Functions by which a loss may keep samples apart."""


def list_spreads(record: Record) -> dict[str, list[Spread]]:
    """Spreads of outputs by site, those that are known.

    Raises:
        CannotTell: there are none.
    """
    found = gather((each.name, each) for each in record.of(Spread) if not math.isnan(each.value))
    if not found:
        raise CannotTell("the spread of outputs over a batch was not recorded")
    return found


# ---- outputs ----


@family.detector("representation-collapse")
def collapse(record: Record, entry: Entry) -> Iterator[Finding]:
    """Outputs that a loss compares with each other alone, and that become the same for all samples."""
    for name, looks in list_spreads(record).items():
        chain = record.need_chains()[0]
        number = _find_comparison(chain)
        if number is None or len(looks) < LOOKS or looks[0].value < SOME or looks[-1].given < SOME:
            continue
        is_stopped = any(chain.listed[each].cuts or chain.listed[each].mode for each in chain.of_loss)
        first, last = looks[0].value, looks[-1].value
        fell, what = first / max(last, NONE), "spread over the batch, beside their size,"
        if fell < FELL:
            first, last = _far(looks[0]), _far(looks[-1])
            fell, what = first / max(last, NONE), "distance from their mean"
        if fell < (FELL_FAR if is_stopped else FELL) or (is_stopped and last > COLLAPSED):
            continue
        path = name.partition(":")[0]
        yield entry.finding(
            f"The outputs of {path} collapse: their {what} has fallen from {first:.3g} to {last:.3g}, and the loss, "
            "which compares outputs with each other alone, is lowest where all are the same",
            site=path,
            step=looks[0].step,
            last_step=looks[-1].step,
            line=chain.listed[number].line,
            evidence=[
                ("how many times it has fallen", fell, f"≥ {FELL_FAR if is_stopped else FELL:g}"),
                ("the spread of inputs at the last look", looks[-1].given, f"≥ {SOME:g}"),
                ("what compares outputs", chain.name(number)),
            ],
        )
        return


def _far(look: Spread) -> float:
    """Root mean square distance of outputs from their mean."""
    return math.sqrt(look.value) * look.size


def _find_comparison(chain: Chain) -> int | None:
    """What holds two outputs against each other, in a loss that is made of outputs alone and tells no samples apart."""
    behind = sorted(chain.behind_outputs & chain.of_loss)
    if len(chain.outputs) < 2 or chain.loss not in chain.behind_outputs:
        return None
    own = [each for each in behind if not chain.listed[each].module]
    if any(_TELLS_APART.search(chain.name(each)) or _takes_other(chain, each) for each in own):
        return None
    found = [each for each in own if chain.name(each) in _COMPARES and _is_of_two(chain, each)]
    rows = [each for each in found if len(chain.taken(each) or ()) > 1 and (chain.taken(each) or ())[-1] > 1]
    signs = [each for each in found if chain.name(each) == "sub" and each not in rows]
    return rows[0] if rows and not signs else None


def _is_of_two(chain: Chain, number: int) -> bool:
    return len({at for at in chain.operands(number) if at in chain.behind_outputs or at in chain.outputs}) > 1


def _takes_other(chain: Chain, number: int) -> bool:
    """Check whether an operation behind the outputs takes numbers that are made of no output, such as targets."""
    operation = chain.listed[number]
    return any(
        at not in chain.behind_outputs and at not in chain.outputs and not taken.endswith("[]")
        for at, taken in zip(operation.operands, operation.takes, strict=False)
    )


@family.detector("output-ignores-input")
def ignores_input(record: Record, entry: Entry) -> Iterator[Finding]:
    """Outputs that are the same for all samples, though inputs differ."""
    spreads = list_spreads(record)
    for path in dict.fromkeys(name.partition(":")[0] for name in spreads):
        listed = [looks for name, looks in spreads.items() if name.partition(":")[0] == path]
        looks = listed[0]
        if not all(len(each) >= LOOKS and all(map(_is_constant, each)) for each in listed):
            continue
        if any(each.value and each.zero == each.value for each in record.of(Units)):
            raise CannotTell("a whole layer is zero, which is said by itself")
        yield entry.finding(
            f"What {path} returns does not depend on its input: all samples of a batch give the same, at each of "
            f"{len(looks)} sampled steps",
            site=path,
            step=looks[0].step,
            last_step=looks[-1].step,
            line=record.line_of(path),
            evidence=[
                ("largest spread over the batch", max(each.value for each in looks), f"< {NONE:g}"),
                ("smallest spread of the input", min(each.given for each in looks), f"≥ {SOME:g}"),
            ],
        )
        return


def _is_constant(look: Spread) -> bool:
    return look.value < NONE and look.size > 0 and look.given >= SOME and look.samples > 2


# ---- masks ----


@family.detector("mask-inverted")
def mask_inverted(record: Record, entry: Entry) -> Iterator[Finding]:
    """A padding mask that lets padding pass, and nothing else."""
    masks = record.of(AttendedTokens)
    if not masks:
        raise CannotTell("no padding mask beside tokens was recorded")
    for line in dict.fromkeys(each.line for each in masks):
        listed = [each for each in masks if each.line == line]
        if not all(each.kept == 1 and each.hidden > 2 and each.lengths > 1 for each in listed) or len(listed) < 2:
            continue
        if len({each.only for each in listed}) > 1:
            continue
        yield entry.finding(
            f"Attention may take token {listed[0].only} alone: the padding mask lets {listed[0].value:.0%} of the "
            f"positions pass, all of them with this token, and hides all {listed[0].hidden} others",
            site=listed[0].name,
            step=listed[0].step,
            last_step=listed[-1].step,
            line=_find_mask(record, line) or line,
            evidence=[
                ("different tokens that it lets pass", 1, "1"),
                ("different tokens that it hides", listed[0].hidden, "> 2"),
                ("different numbers of positions it lets pass in a row", listed[0].lengths, "> 1"),
            ],
        )
        return


@family.detector("mask-hides-nothing")
@first_operation
def mask_hides_nothing(record: Record, chain: Chain, number: int, entry: Entry) -> Finding | None:
    """A mask of yes and no that moves the scores of attention by 1 or to 0, where it should make them −∞."""
    name, operation = chain.name(number), chain.listed[number]
    if name == "softmax":
        at, how = _find_weak_mask(axes_of(record, chain), chain, number)
        repair = ""
    elif name in (ATTENTION, "scaled_dot_product_attention"):
        places = [place for place in _list_masks(operation) if is_float(operation.takes[place])]
        weak = [place for place in places if is_mask(chain, number, place)]
        at, how = number if weak else -1, "is added to the scores as 1 and 0"
        hides = "True is hidden" if name == ATTENTION else "True takes part"
        repair = f"give {name} the mask as it is, of dtype bool ({hides}): numbers are added to the scores."
    else:
        return None
    if at < 0:
        return None
    return entry.finding_at(
        record,
        chain,
        at,
        f"The mask of attention {how}, so it hides nothing: softmax gives what is masked a share all the same",
        evidence=[("operands", ", ".join(chain.listed[at].takes)), ("operation", chain.name(at))],
        repair=repair,
    )


_THROUGH = VIEWS | {"dropout", "masked_fill", "where", "add", "sub", "mul", "div"}


def _list_masks(operation: Operation) -> list[int]:
    """Which operands of attention are masks: those after query, key and value, or those that are named so."""
    named = re.findall(r"(\w+)=tensor", operation.arguments)
    places = range(len(operation.takes) - len(named), len(operation.takes))
    if name_of(operation) == ATTENTION:
        return [place for place, each in zip(places, named, strict=True) if each.endswith("mask")]
    return list(range(3, len(operation.takes)))


def _find_weak_mask(table: AxisTable, chain: Chain, number: int) -> tuple[int, str]:
    """Where a mask is taken that hides nothing from a softmax of attention, and what it does; −1 for nowhere."""
    at, summed = chain.maker(number, 0, frozenset()), find_contractions(table, chain, number)
    if not summed or any(each.kind != "product" for each in summed):
        return -1, ""
    while at >= 0 and chain.name(at) in _THROUGH:
        how = _describe_masking(chain, at)
        if how:
            return (at, how) if how != _HIDES else (-1, "")
        grown = [each for each in chain.operands(at) if chain.listed[each].node]
        at = grown[0] if grown else -1
    return -1, ""


_HIDES = "hides"


def _describe_masking(chain: Chain, number: int) -> str:
    """Describe how an operation masks scores: not at all, so that they are hidden, or so that they are not."""
    name, operation = chain.name(number), chain.listed[number]
    masks = [place for place in range(len(operation.takes)) if is_mask(chain, number, place)]
    if any(chain.name(chain.maker(each)).startswith("rand") for each in chain.operands(number)):
        return ""  # a dropout of scores
    if not masks or (len(operation.takes) < 2 and name in ("add", "sub", "mul")):
        return ""
    if name in ("add", "sub"):
        if not any(_is_of_keys(chain, number, place) for place in masks):
            return ""  # pairs may be meant to be preferred, as neighbours in a graph
        return f"is {'added to' if name == 'add' else 'subtracted from'} the scores as 1 and 0"
    if name == "mul":
        return "multiplies the scores by 1 and 0"
    filled = re.search(r"-?\d[\d.e+-]*$", operation.arguments)
    if name == "masked_fill" and filled is not None and float(filled[0]) >= 0:
        return f"sets scores to {float(filled[0]):g}"
    return _HIDES if name in ("masked_fill", "where") else ""


def _is_of_keys(chain: Chain, number: int, place: int) -> bool:
    """Check whether a mask is the same for all queries, as that of padding, or lets each see those before it."""
    shape = chain.taken(number, place) or ()
    return len(shape) < 2 or shape[-2] == 1 or chain.name(chain.maker(number, place)) in ("tril", "triu")


def _find_mask(record: Record, line: str) -> str:
    """The line that made the mask which is taken at a line; empty where that was not seen."""
    for chain in record.chains[:1]:
        for number, operation in enumerate(chain.listed):
            is_fill = chain.name(number).startswith("masked_fill")
            if operation.line == line and (is_fill or chain.name(number) == "scaled_dot_product_attention"):
                made = chain.maker(number, len(operation.operands) - 1, VIEWS | {"masked_fill"})
                return chain.listed[made].line if made >= 0 else ""
    return ""


# ---- evaluation ----


@family.detector("evaluation-inputs")
def evaluation_inputs(record: Record, entry: Entry) -> Iterator[Finding]:
    """Inputs of evaluation that have another scale than those of training."""
    is_known = False
    for name, listed in record.inputs.items():
        plain = [each for each in listed if is_float(each.dtype) and math.prod(each.shape) > 1]
        train = [each for each in plain if each.moment.phase == "train"]
        evaluated = [each for each in plain if each.moment.phase in ("eval", "no_grad", "inference")]
        if len(train) < LOOKS or not evaluated:
            continue
        is_known = True
        if not all(_is_other(each, train) for each in evaluated) or not is_taken_as_it_is(record.chains, train[0]):
            continue
        mean, std = _typical(train)
        seen = evaluated[-1]
        yield entry.finding(
            f"The inputs of evaluation have another scale than those of training: {name} has mean {seen.value:.3g} and "
            f"standard deviation {seen.std:.3g} there, and {mean:.3g} and {std:.3g} in training",
            site=name,
            step=evaluated[0].step,
            last_step=seen.step,
            line=_find_call(record),
            evidence=[
                ("standard deviation in evaluation", seen.std, f"{OTHER:g} times another than {std:.3g}, or the mean"),
                ("mean in evaluation", seen.value, f"{OTHER:g} standard deviations from {mean:.3g}, or the deviation"),
            ],
        )
        return
    if not is_known:
        raise CannotTell("no inputs of training and of evaluation were recorded for one model")


def _typical(train: Sequence[Input]) -> tuple[float, float]:
    return float(np.median([each.value for each in train])), float(np.median([each.std for each in train]))


def _is_other(look: Input, train: Sequence[Input]) -> bool:
    """Check whether an input lies far from all those of training."""
    mean, std = _typical(train)
    stds, means = [each.std for each in train], [each.value for each in train]
    if not (std > 0 and look.std > 0 and np.isfinite([look.std, look.value]).all()):
        return False
    if look.std > OTHER * max(stds) or look.std < min(stds) / OTHER:
        return True
    return abs(look.value - mean) > OTHER * std + max(means) - min(means)


def _find_call(record: Record) -> str:
    """The line at which a model is called without grad mode; empty where that is not known."""
    called = [call for call in record.called("forward") if call.details.get("grad") is False]
    return next((call.line for call in called), "")
