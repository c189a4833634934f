"""Targets that ask for something else than the task: shifted wrongly, padding, sorted by class."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from retrograd.core.groups import gather
from retrograd.core.history.data_facts import SHIFTS, Targets
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.chain import AFFINE, SOFTMAXES, VIEWS, Chain, argument_of, count, name_of
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.record import CannotTell, Record

family = Family(__name__)

LOOKS = 2
"""Looks that it takes, at least, to speak of targets."""

MANY = 16
"""Targets of a batch, at least, that are held against tokens."""

OTHER = 0.9
"""Share of equal tokens below which all other shifts must stay; our own choice."""

PADDING = 0.5
"""Share of padding among targets; our own choice."""

CONSTANT = 6
"""Batches of one class, at least, of which targets are called sorted; our own choice."""

ONE_CLASS = 0.75
"""Share of the sampled batches that they are; our own choice."""

_LOG = VIEWS | {"log_softmax"}
_POINTWISE = frozenset(
    {
        "linear", "addmm", "add", "mul", "sub", "div", "relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu",
        "softplus", "dropout", "layer_norm", "rms_norm", "matmul", "log_softmax", "lstm", "gru", "rnn_tanh", "mish",
        "rnn_relu", "hardswish"
    }
)  # fmt: skip
"""Functions that make of each position something of its own, or of what came before it, too, as recurrent ones."""

_COMBINE = ("mul", "div", "matmul")
"""Of these a second operand that is not a position's own may hide it, as a mask does."""

_SHIFT = re.compile(r"(?:^|[(, ])1:(?:[,) ]|$)")
"""A slice that leaves the first one out."""

_RANDOM = re.compile("rand|bernoulli|normal|multinomial|drop(?!out$)")


def list_looks(record: Record) -> dict[tuple[str, str], list[Targets]]:
    """Integer targets by the line of their loss, and its function.

    Raises:
        CannotTell: there are none.
    """
    found = gather(((each.line, each.loss), each) for each in record.of(Targets) if each.classes)
    if not found:
        raise CannotTell("no loss with integer targets was recorded")
    return found


def _find_loss(record: Record, look: Targets) -> tuple[Chain, int]:
    """The loss of a look among the noted operations.

    Raises:
        CannotTell: it is not among them.
    """
    names = ("gather", "take_along_dim", "getitem") if look.loss == "gather" else (look.loss,)
    for chain in record.need_chains():
        for number in sorted(chain.of_loss):
            is_there = chain.name(number) in names and chain.listed[number].line == look.line
            if is_there and (look.loss != "gather" or chain.name(chain.maker(number)) == "log_softmax"):
                return chain, number
    raise CannotTell("the loss is not among the operations that were recorded")


# ---- shifts ----


def _find_shift(record: Record, listed: Sequence[Targets]) -> tuple[int, Chain, int] | None:
    """How far ahead of their logits targets are, where all of them are the same tokens so far ahead; else None."""
    compared = [each for each in listed if each.shifts and each.elements - each.ignored >= MANY]
    if len(compared) < LOOKS or len(compared) < len(listed):
        return None
    shares = np.array([each.shifts for each in compared])
    equal = np.flatnonzero((shares == 1.0).all(0))
    if len(equal) != 1 or (np.median(np.delete(shares, equal[0], axis=1), axis=0) > OTHER).any():
        return None
    chain, number = _find_loss(record, compared[0])
    return SHIFTS[equal[0]] - _find_begin(chain, number, compared[0]), chain, number


def _find_begin(chain: Chain, number: int, look: Targets) -> int:
    """The position of the first logits that a loss takes, in the sequence: 1 for ``logits[:, 1:]``."""
    begin, at = 0, chain.listed[number].operands[0]
    while at >= 0 and chain.name(at) in _LOG and chain.listed[at].operands:
        if chain.name(at) == "getitem":
            begin += _read_begin(chain.listed[at].arguments, look.axis)
        at = chain.listed[at].operands[0]
    return begin


def _read_begin(arguments: str, axis: int) -> int:
    parts = [each.strip() for each in arguments.strip("()").split(",")]
    if "..." in parts:
        place = parts.index("...")
        parts[place : place + 1] = [":"] * max(0, axis + 1 - (len(parts) - 1 - place)) or [":"]
    begin = parts[axis].partition(":")[0] if axis < len(parts) and ":" in parts[axis] else ""
    return int(begin) if begin.isdigit() else 0


@family.detector("targets-shifted-twice")
def shifted_twice(record: Record, entry: Entry) -> Iterator[Finding]:
    """Targets that are the token after the next one."""
    found = []
    for listed in list_looks(record).values():
        shift = _find_shift(record, listed)
        if shift is not None and shift[0] == 1:
            return  # several tokens ahead are predicted on purpose, and this one is the next
        if shift is not None and shift[0] == 2:
            found.append((listed, *shift))
    for listed, _, chain, number in found[:1]:
        place = chain.maker(number, 0, _LOG)
        slices = _list_slices(chain, number)
        lines = list(dict.fromkeys(chain.listed[each].line for each in slices))
        where = f": they are shifted in {len(lines)} places" if len(lines) > 1 else ""
        yield entry.finding_at(
            record,
            chain,
            place if place >= 0 else number,
            f"Targets of {listed[0].loss} are the token after the next one: each is the input two positions ahead of "
            f"its logits{where}",
            line=lines[0] if lines else listed[0].line,
            step=listed[0].step,
            last_step=listed[-1].step,
            evidence=[
                ("share of targets equal to the token two ahead", 1.0, "1 is what predicts the next token elsewhere"),
                ("share equal to the next token", listed[0].shifts[SHIFTS.index(1)]),
                *[("a shift of the targets", line) for line in lines],
            ],
        )


def _list_slices(chain: Chain, number: int) -> list[int]:
    """Slices of the targets of a loss that leave the first ones out, in order."""
    operands = chain.listed[number].operands
    begun = operands[1] if len(operands) > 1 else -1
    made = chain.ancestors(begun) if begun >= 0 else frozenset[int]()
    return [
        each for each in sorted(made) if chain.name(each) == "getitem" and _SHIFT.search(chain.listed[each].arguments)
    ]


@family.detector("targets-not-shifted")
def not_shifted(record: Record, entry: Entry) -> Iterator[Finding]:
    """Targets that are the very tokens which their logits are made of."""
    for listed in list_looks(record).values():
        shift = _find_shift(record, listed)
        if shift is None or shift[0] != 0:
            continue
        _, chain, number = shift
        begun = [each for each in range(number) if chain.listed[each].line == listed[0].tokens]
        begun = [each for each in begun if chain.name(each) in ("embedding", "one_hot", "getitem")]
        made = chain.maker(number, 0, _LOG)
        if made >= 0 and any(_Path(chain, each, listed[0].classes).reaches(made) for each in begun):
            yield entry.finding_at(
                record,
                chain,
                made,
                f"Targets of {listed[0].loss} are the model's own input, position by position, and nothing hides it: "
                "the model learns to copy",
                line=listed[0].line,
                step=listed[0].step,
                last_step=listed[-1].step,
                evidence=[
                    ("share of targets equal to the token at their own position", 1.0, "1"),
                    ("share equal to the next token", listed[0].shifts[SHIFTS.index(1)]),
                    ("loss at the last look", listed[-1].value),
                ],
            )
            return


class _Path:
    """Whether what an embedding made comes to logits position by position, as wide as it was, with nothing hidden.

    Args:
        chain: the operations.
        begin: number of the embedding.
        classes: of the logits.
    """

    def __init__(self, chain: Chain, begin: int, classes: int) -> None:
        self._chain, self._begin = chain, begin
        made = chain.made(begin)
        self._rows = count(made[:-1]) if made else 0
        self._least = min(made[-1], classes) // 2 if made else 0
        self._known: dict[int, bool] = {begin: True}

    def reaches(self, number: int) -> bool:
        """Check whether one comes to an operation; operations before it are asked first, for nets are deep."""
        for each in sorted(self._chain.ancestors(number)):
            if each not in self._known:
                self._known[each] = self._passes(each)
        return self._known[number]

    def _passes(self, number: int) -> bool:
        chain = self._chain
        name, made = chain.name(number), chain.made(number)
        if not made or count(made[:-1]) != self._rows or made[-1] < self._least:
            return False
        operands = chain.listed[number].operands
        own = [self._known.get(each, False) for each in operands]
        if name in VIEWS:
            return own[0] if own else False
        if name not in _POINTWISE or not any(own):
            return False
        others = [(place, each) for place, (each, is_own) in enumerate(zip(operands, own, strict=True)) if not is_own]
        return not any(self._hides(name, number, place, each) for place, each in others)

    def _hides(self, name: str, number: int, place: int, other: int) -> bool:
        """Check whether another operand may keep from the position what it was."""
        chain = self._chain
        if name in _COMBINE and name != "matmul":
            return other >= 0 or len(chain.taken(number, place) or ()) > 1
        if name == "matmul" and (other >= 0 or place == 0):
            return True
        return other >= 0 and any(_RANDOM.search(chain.name(each)) for each in chain.ancestors(other))


# ---- padding ----


@family.detector("padding-in-loss")
def padding_in_loss(record: Record, entry: Entry) -> Iterator[Finding]:
    """Targets that are padding for the most part."""
    for listed in list_looks(record).values():
        padded = [each for each in listed if each.share >= PADDING and each.tail == 1.0 and each.filler]
        is_ragged = sum(each.lengths > 1 for each in padded) >= LOOKS
        if len(padded) < max(LOOKS, len(listed)) or not is_ragged or len({each.most for each in padded}) > 1:
            continue
        chain, number = _find_loss(record, listed[0])
        if not _is_averaged(chain, number):
            continue
        share, most = float(np.median([each.share for each in padded])), listed[0].most
        yield entry.finding(
            f"{share:.0%} of the targets of {listed[0].loss} are padding: class {most} fills each row from its end on, "
            "and counts like any other",
            site=listed[0].name,
            step=listed[0].step,
            last_step=listed[-1].step,
            line=listed[0].line,
            evidence=[
                ("share of the targets", share, f"≥ {PADDING:g}"),
                ("share of them behind which no other stands in the row", 1.0, "1"),
                ("different lengths of rows without them", max(each.lengths for each in padded), "> 1"),
            ],
        )
        return


def _is_averaged(chain: Chain, number: int) -> bool:
    """Check whether each target counts as much as the others in what a loss gives."""
    operation = chain.listed[number]
    if name_of(operation) in ("cross_entropy", "nll_loss"):
        return argument_of(operation, "reduction") != "none" and len(operation.operands) == 2
    while True:
        users = [each for each in chain.users(number) if each in chain.of_loss]
        if len(users) != 1:
            return False
        number = users[0]
        if chain.name(number) in ("mean", "sum"):
            return True
        if chain.name(number) not in VIEWS | {"neg"} or len(chain.listed[number].operands) != 1:
            return False


# ---- order ----


@family.detector("sorted-labels")
def sorted_labels(record: Record, entry: Entry) -> Iterator[Finding]:
    """Batches of one class each, of different classes."""
    known = list_looks(record)
    if len(record.optimizers) > 1:
        raise CannotTell("several optimizers may train on what is real and what is not in turn")
    for listed in known.values():
        if len({each.step for each in listed}) < len(listed):
            continue  # a loss that is called several times in a step, as of what is real and what is generated
        whole = [each for each in listed if each.elements - each.ignored >= MANY // 2]
        constant = [each for each in whole if each.seen == 1]
        if len(constant) < max(CONSTANT, ONE_CLASS * len(listed)) or not _vary(constant):
            continue
        chain, number = _find_loss(record, listed[0])
        own = [each for each in chain.losses() if chain.name(each) == chain.name(number)]
        made = chain.name(chain.maker(number, 0, _LOG | SOFTMAXES))
        if len(own) > 1 or made not in AFFINE | {"add"} or not _is_averaged(chain, number):
            continue
        classes = len({each.most for each in constant})
        some = "each of" if len(constant) == len(listed) else f"{len(constant)} of"
        holds = "holds" if len(constant) == len(listed) else "hold"
        yield entry.finding(
            f"Data come sorted by class: {some} the {len(listed)} sampled batches {holds} a single class, "
            f"and there are {classes} classes among them",
            site=listed[0].name,
            step=listed[0].step,
            last_step=listed[-1].step,
            line=listed[0].line,
            evidence=[
                ("sampled batches of one class", len(constant), f"≥ {CONSTANT}"),
                ("different classes", classes, "> 1"),
                ("targets of a batch", listed[0].elements),
            ],
        )
        return


def _vary(constant: Sequence[Targets]) -> bool:
    """Check that the classes of batches differ: three of them, or the second at two looks; one may be an accident."""
    times = sorted(sum(each.most == one for each in constant) for one in {each.most for each in constant})
    return len(times) > 2 or (len(times) == 2 and times[0] > 1)
