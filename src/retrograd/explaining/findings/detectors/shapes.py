"""Shapes and dimensions that fit by accident."""

from __future__ import annotations

import re

from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.chain import AFFINE, LOSSES, RESHAPES, SOFTMAXES, Chain, argument_of, is_float
from retrograd.explaining.findings.entry import Entry, Family, first_operation
from retrograd.explaining.findings.record import Record

family = Family(__name__)


_PAIRWISE = frozenset({"sub", "rsub", "add", "mul", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "div"})


@family.detector("broadcast-loss")
@first_operation
def broadcast_loss(record: Record, chain: Chain, number: int, entry: Entry) -> Finding | None:
    """Every output is compared with every target."""
    if not _broadcasts(chain, number):
        return None
    operation = chain.listed[number]
    first, second = operation.takes[:2]
    is_output_long = _depends(chain, number)[0] == (len(chain.taken(number) or ()) == 2)
    long, short = ("output", "target") if is_output_long else ("target", "output")
    shape = list(chain.made(number)) if chain.name(number) not in LOSSES else [max(_plain(chain, number))] * 2
    return entry.finding(
        f"{first} and {second} broadcast to {shape} in {chain.name(number)}, so each output is compared with the "
        "targets of all samples",
        site=operation.module,
        step=chain.step,
        line=operation.line,
        evidence=[("operands", f"{first}, {second}", "(n, 1) with (n)"), ("result", str(shape))],
        repair=f"give both the same shape: {long}.squeeze(1), or {short}.unsqueeze(1).",
    )


def _plain(chain: Chain, number: int) -> tuple[int, ...]:
    return (chain.taken(number, 0) or ()) + (chain.taken(number, 1) or ())


def _broadcasts(chain: Chain, number: int) -> bool:
    if chain.name(number) not in _PAIRWISE or len(chain.listed[number].operands) < 2:
        return False
    shapes = [chain.taken(number, 0), chain.taken(number, 1)]
    if None in shapes:
        return False
    (short, long) = sorted((each for each in shapes if each is not None), key=len)
    is_crossed = len(short) == 1 and len(long) == 2 and long == (short[0], 1) and short[0] > 1
    return is_crossed and sum(_depends(chain, number)) == 1


def _depends(chain: Chain, number: int) -> list[bool]:
    """Check of each of two operands whether the model's output is in it."""
    made_by = chain.of_outputs | chain.behind_outputs
    return [operand in made_by for operand in chain.listed[number].operands[:2]]


@family.detector("wrong-dim")
@first_operation
def wrong_dimension(record: Record, chain: Chain, number: int, entry: Entry) -> Finding | None:
    """A function that works along a dimension that it should not."""
    message = next((found for judge in _JUDGES if (found := judge(chain, number))), "")
    if not message:
        return None
    operation = chain.listed[number]
    return entry.finding_at(
        record,
        chain,
        number,
        message,
        evidence=[
            ("operation", f"{chain.name(number)}({operation.arguments})"),
            ("operands", ", ".join(operation.takes[:2])),
        ],
    )


def _dimension(chain: Chain, number: int) -> int | None:
    """The dimension that a function runs along, counted from 0; of a softmax without one, that which torch chooses."""
    text, shape = argument_of(chain.listed[number], "dim"), chain.taken(number)
    if shape is None or not shape:
        return None
    if text is None and chain.name(number) in SOFTMAXES:
        return 0 if len(shape) in (1, 3) else 1
    return int(text) % len(shape) if text is not None and re.fullmatch(r"-?\d+", text) else None


def _judge_softmax(chain: Chain, number: int) -> str:
    """A softmax whose result the loss takes: over the batch or positions, or over a single element."""
    shape, dim, name = chain.taken(number), _dimension(chain, number), chain.name(number)
    if name not in SOFTMAXES or shape is None or dim is None or not _is_last(chain, number):
        return ""
    if shape[dim] == 1:
        always = "1" if name == "softmax" else "0"
        return (
            f"{name} runs over dimension {dim} of {list(shape)}, which has one element: its result is always "
            f"{always}, and its gradient 0"
        )
    maker = chain.maker(number, 0, frozenset({"dropout", "contiguous", "to", "float"}))
    is_features = chain.name(maker) == "linear" and chain.made(maker) == shape and dim != len(shape) - 1
    if is_features or (dim == 0 and len(shape) > 1 and shape[0] == _batch(chain, number)):
        what = "the batch" if dim == 0 else "positions and not classes"
        return (
            f"{name} runs over dimension {dim} of {list(shape)}, which is {what}: the probabilities of one sample do "
            "not add up to 1"
        )
    return ""


def _is_last(chain: Chain, number: int) -> bool:
    """Check whether the loss is made of it without another layer in between."""
    behind = chain.descendants((number,)) & chain.of_loss
    return bool(behind) and not any(chain.name(each) in _LAYERS for each in behind)


_LAYERS = AFFINE | {"matmul", "bmm", "einsum", "mm", "lstm", "gru", "mul"}


def _batch(chain: Chain, number: int) -> int | None:
    """The size of the target's first dimension, or of what the model got."""
    for each in chain.descendants((number,)):
        if chain.name(each) in LOSSES:
            return (chain.taken(each, 1) or (None,))[0]
    first = next((shape for each in range(len(chain)) if (shape := chain.taken(each)) and len(shape) > 1), None)
    return first[0] if first else None


def _judge_attention(chain: Chain, number: int) -> str:
    """Weights that are normalised over one dimension, and summed over another one."""
    shape, dim = chain.taken(number), _dimension(chain, number)
    if chain.name(number) != "softmax" or shape is None or dim is None or len(shape) < 2:
        return ""
    summed = _summed_dimension(chain, number, len(shape))
    if summed is None or summed == dim:
        return ""
    is_gate = any(chain.name(user) in _CHOOSING for user, _ in _users_behind(chain, number))
    if is_gate:
        return (
            f"The weights of a gate, of shape {list(shape)}, are normalised by softmax over dimension {dim}, and the "
            f"largest is picked along dimension {summed}: those of one sample do not add up to 1"
        )
    return (
        f"Attention weights of shape {list(shape)} are normalised by softmax over dimension {dim}, and summed over "
        f"dimension {summed}: the weights of one sum do not add up to 1"
    )


def _judge_normalize(chain: Chain, number: int) -> str:
    """Vectors that are normalised along one dimension, and whose inner products run along the other one."""
    shape = chain.taken(number)
    if chain.name(number) != "normalize" or shape is None or len(shape) != 2:
        return ""
    text = argument_of(chain.listed[number], "dim")
    dim = 1 if text is None else _dimension(chain, number)
    along = _multiplied_along(chain, number)
    if dim is None or along in (None, dim):
        return ""
    return (
        f"normalize runs over dimension {dim} of {list(shape)}, and inner products over dimension {along}: the vectors "
        "that are multiplied do not have length 1"
    )


def _multiplied_along(chain: Chain, number: int) -> int | None:
    """The dimension of a matrix along which products with it are summed; None where that is not plain."""
    found: set[int | None] = set()
    for user in chain.users(number):
        operands, name = chain.listed[user].operands, chain.name(user)
        if name in ("matmul", "mm"):
            found |= {place for place, each in ((1, operands[0]), (0, operands[1])) if each == number}
        elif name in ("t", "T", "mT", "transpose"):
            turned = _multiplied_along(chain, user)
            found.add(None if turned is None else 1 - turned)
        else:
            found.add(None)
    return next(iter(found)) if len(found) == 1 else None


def _summed_dimension(chain: Chain, number: int, dimensions: int) -> int | None:
    """The dimension of a softmax over which its product with something else is summed; None where that is not plain."""
    found: set[int | None] = set()
    for user, made in _users_behind(chain, number):
        name = chain.name(user)
        is_product = name in ("matmul", "bmm") and made == chain.listed[user].operands[0] and dimensions > 2
        if is_product or (_picks_last(chain, user, dimensions) and _is_of_layer(chain, number)):
            found.add(dimensions - 1)
        elif name == "mul" and len(chain.operands(user)) == 2:
            sums = [each for each in chain.users(user) if chain.name(each) == "sum"]
            found |= {_dimension(chain, each) for each in sums} if len(sums) == len(chain.users(user)) else {None}
        else:
            found.add(None)
    return next(iter(found)) if len(found) == 1 else None


_CHOOSING = ("max", "topk", "argmax")
"""Functions by which a gate picks experts."""


def _picks_last(chain: Chain, number: int, dimensions: int) -> bool:
    return chain.name(number) in _CHOOSING and _dimension(chain, number) == dimensions - 1


def _is_of_layer(chain: Chain, number: int) -> bool:
    """Check whether it works on what a linear layer has made, the features of which are in the last dimension."""
    maker = chain.maker(number, 0, frozenset({"dropout", "to", "float", "add", "div", "mul"}))
    return chain.name(maker) == "linear" and chain.made(maker) == chain.taken(number)


def _users_behind(chain: Chain, number: int) -> list[tuple[int, int]]:
    """Who takes what an operation made, behind dropout and a dimension added at the end, and from which of these."""
    found = []
    for user in chain.users(number):
        is_same = chain.name(user) == "dropout" or (
            chain.name(user) == "unsqueeze"
            and chain.listed[user].arguments in ("-1", "dim=-1", f"dim={len(chain.made(number))}")
        )
        found += _users_behind(chain, user) if is_same else [(user, number)]
    return found


def _judge_classes(chain: Chain, number: int) -> str:
    """Logits of which dimension 1 is not a class."""
    shape = chain.taken(number)
    if chain.name(number) != "cross_entropy" or shape is None or len(shape) < 3:
        return ""
    maker = chain.maker(number, 0, frozenset({"dropout", "contiguous", "clone", "to", "float"}))
    if maker < 0 or chain.name(maker) != "linear" or chain.made(maker) != shape:
        return ""
    target = chain.listed[number].takes[1] if len(chain.listed[number].takes) > 1 else ""
    is_soft = is_float(target) and chain.taken(number, 1) == shape
    if not is_soft and shape[1] != shape[-1]:
        return ""
    return (
        f"cross_entropy takes dimension 1 of {list(shape)} for classes, and the linear layer has put them into the "
        "last one: probabilities are taken over positions"
    )


def _judge_recurrent(chain: Chain, number: int) -> str:
    """The last step of a recurrent layer, or a mean over steps, taken along what it holds for the batch."""
    operation, shape = chain.listed[number], chain.taken(number)
    maker = operation.operands[0] if operation.operands else -1
    if maker < 0 or shape is None or len(shape) != 3 or chain.name(maker) not in _RECURRENT:
        return ""
    is_batch_first = chain.listed[maker].arguments.rstrip(") ").endswith("True")
    batch = 0 if is_batch_first else 1
    if _picked_dimension(chain, number) != batch:
        return ""
    order = "batch first" if is_batch_first else "time first (batch_first is False)"
    return (
        f"The output of {chain.name(maker)} has shape {list(shape)}, {order}, and {_WHAT[chain.name(number)]} is "
        f"taken along dimension {batch}: over its {shape[batch]} sequences, and not over steps"
    )


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_WHAT = {
    "getitem": "the last element",
    "mean": "the mean",
    "sum": "the sum",
    "amax": "the maximum",
    "max": "the maximum",
}


def _picked_dimension(chain: Chain, number: int) -> int | None:
    """Along which dimension the last element, or a mean, is taken."""
    if chain.name(number) == "getitem":
        index = chain.listed[number].arguments.strip("()")
        return 0 if re.match(r"-1\b", index) else 1 if re.match(r":, -1\b", index) else None
    return _dimension(chain, number) if chain.name(number) in _WHAT else None


_JUDGES = (_judge_softmax, _judge_attention, _judge_normalize, _judge_classes, _judge_recurrent)


@family.detector("reshape-mixes-batch")
@first_operation
def reshape_mixes(record: Record, chain: Chain, number: int, entry: Entry) -> Finding | None:
    """A reshape where a permutation is meant."""
    what = _mixes(chain, number)
    if not what:
        return None
    before, after = list(chain.taken(number) or ()), list(chain.made(number))
    return entry.finding_at(
        record,
        chain,
        number,
        f"{chain.name(number)} makes {after} of {before}: elements stay where they are, so {what} are mixed with "
        "each other",
        evidence=[("shape before", str(before)), ("shape after", str(after))],
    )


def _mixes(chain: Chain, number: int) -> str:
    """Describe what a reshape mixes; empty where it mixes nothing, or where shapes cannot tell."""
    before = chain.taken(number)
    if chain.name(number) not in RESHAPES or before is None:
        return ""
    old = tuple(size for size in before if size != 1)
    new = tuple(size for size in chain.made(number) if size != 1)
    maker = chain.listed[number].operands[0] if chain.listed[number].operands else -1
    if chain.name(maker) in ("permute", "transpose", "t", "T", "mT", "movedim", "swapaxes"):
        return ""
    if len(old) == len(new) > 1 and old != new and sorted(old) == sorted(new):
        return "samples and steps" if len(old) > 2 else "rows and columns"
    if _splits_across(old, new) or _splits_across(new, old):
        return "steps and heads"
    return ""


def _splits_across(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Check whether ``(…, t, h·d)`` becomes ``(…, h, t, d)``."""
    if len(new) != len(old) + 1 or len(old) < 2:
        return False
    *rest, steps, features = old
    *same, heads, behind, size = new
    return rest == same and behind == steps != heads and heads * size == features
