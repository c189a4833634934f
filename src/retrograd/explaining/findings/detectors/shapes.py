"""Shapes and dimensions that fit by accident."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations, zip_longest

from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.axes import (
    ATTENTION,
    RECURRENT,
    Attended,
    Axes,
    AxisTable,
    Contraction,
    Dim,
    axes_of,
    find_attended,
    find_codes,
    find_contractions,
    is_batch_first,
)
from retrograd.explaining.findings.chain import (
    AFFINE,
    LOSSES,
    RESHAPES,
    SOFTMAXES,
    Chain,
    argument_of,
    is_float,
    is_mask,
    shape_of,
)
from retrograd.explaining.findings.entry import Entry, Family, first_operation
from retrograd.explaining.findings.record import Record

family = Family(__name__)


_PAIRWISE = frozenset(
    {"sub", "rsub", "add", "mul", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "div", "where", "masked_fill"}
)
_WHOLE = frozenset({"sum", "mean", "nansum", "nanmean"})


@family.detector("broadcast-loss")
@first_operation
def broadcast_loss(record: Record, chain: Chain, number: int, entry: Entry) -> Finding | None:
    """Every output is compared with every target, or masked by the masks of all samples."""
    crossed = _find_crossed(chain, number)
    if crossed is None:
        return None
    operation, (first, second) = chain.listed[number], crossed
    takes, shapes = operation.takes, [chain.taken(number, each) or () for each in crossed]
    is_masked = any(is_mask(chain, number, each) for each in crossed)
    is_output_long = _depends(chain, number, first) == (len(shapes[0]) > len(shapes[1]))
    other = "mask" if is_masked else "target"
    long, short = ("output", other) if is_output_long else (other, "output")
    shape = _broadcast(*shapes)
    what = "masked by the masks" if is_masked else "compared with the targets"
    return entry.finding(
        f"{takes[first]} and {takes[second]} broadcast to {shape} in {chain.name(number)}, so each output is {what} "
        "of all samples",
        site=operation.module,
        step=chain.step,
        line=operation.line,
        evidence=[
            ("operands", f"{takes[first]}, {takes[second]}", "samples in one dimension of the result"),
            ("result", str(shape)),
        ],
        repair=f"give both the same shape: {long}.squeeze(1), or {short}.unsqueeze(1).",
    )


def _broadcast(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The shape of what two shapes that broadcast make."""
    return [max(pair) for pair in zip_longest(reversed(first), reversed(second), fillvalue=1)][::-1]


def _find_crossed(chain: Chain, number: int) -> tuple[int, int] | None:
    """Two operands, one of them of the model, whose samples broadcast into different dimensions; None for none such.

    That of fewer dimensions, of shape (n, …), meets the other one, (n, 1, …), with its samples in dimension 1. Of more
    than (n, 1) and (n) all pairs may be meant, as for distances: not where they are masked, nor where all is added up.
    """
    if chain.name(number) not in _PAIRWISE:
        return None
    given = [each for each, shape in enumerate(map(shape_of, chain.listed[number].takes)) if shape]
    for first, second in combinations(given, 2):
        short, long = sorted((chain.taken(number, first) or (), chain.taken(number, second) or ()), key=len)
        is_crossed = len(long) == len(short) + 1 and long[:2] == (short[0], 1) and short[0] > 1
        if not is_crossed or _depends(chain, number, first) == _depends(chain, number, second):
            continue
        is_masked = any(is_mask(chain, number, each) for each in (first, second))
        if len(short) == 1 or is_masked or (_is_added_up(chain, number) and not _is_spread(chain, number, short)):
            return first, second
    return None


def _is_added_up(chain: Chain, number: int) -> bool:
    """Check whether one number is made of all that an operation makes, and nothing else is."""
    shape, users = chain.made(number), [each for each in chain.users(number) if each in chain.of_loss]
    if not shape:
        return True
    return bool(users) and all(
        (chain.name(each) in _WHOLE and not chain.made(each))
        or (chain.made(each) == shape and chain.name(each) not in SOFTMAXES and _is_added_up(chain, each))
        for each in users
    )


def _is_spread(chain: Chain, number: int, short: tuple[int, ...]) -> bool:
    """Check whether a dimension was added on purpose to what had the shape of the other operand."""
    makers = chain.operands(number)
    return any(chain.name(each) in ("unsqueeze", "getitem") and chain.taken(each) == short for each in makers)


def _depends(chain: Chain, number: int, operand: int) -> bool:
    """Check whether an operand has a graph, and the model's output is made of it, or it of the output."""
    maker = chain.listed[number].operands[operand]
    return maker in chain.of_outputs | chain.behind_outputs and bool(chain.listed[maker].node)


@family.detector("wrong-dim")
@first_operation
def wrong_dimension(record: Record, chain: Chain, number: int, entry: Entry) -> Finding | None:
    """A function that works along a dimension that it should not."""
    table, operation = axes_of(record, chain), chain.listed[number]
    message = next((found for judge in _JUDGES if (found := judge(table, chain, number))), "")
    if not message:
        return None
    is_layer = chain.name(number) in RECURRENT or chain.name(number) == ATTENTION
    return entry.finding_at(
        record,
        chain,
        number,
        message,
        **({"line": made} if is_layer and (made := record.line_of(operation.module)) else {}),
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


def _judge_softmax(table: AxisTable, chain: Chain, number: int) -> str:
    """A softmax over a single element, or, where the loss takes its result, over the batch or positions."""
    shape, dim, name = chain.taken(number), _dimension(chain, number), chain.name(number)
    if name not in SOFTMAXES or shape is None or dim is None:
        return ""
    is_last, maker = (
        _is_last(chain, number),
        chain.maker(number, 0, frozenset({"dropout", "contiguous", "to", "float"})),
    )
    is_layer = chain.name(maker) == "linear" and chain.made(maker) == shape
    if shape[dim] == 1 and (is_last or (is_layer and dim == len(shape) - 1)):
        always = "1" if name == "softmax" else "0"
        return (
            f"{name} runs over dimension {dim} of {list(shape)}, which has one element: its result is always "
            f"{always}, and its gradient 0"
        )
    if not is_last:
        return ""
    is_features = is_layer and dim != len(shape) - 1
    is_batch = _is_batch_alone(table, table.taken(number), dim)
    if is_features or is_batch or (dim == 0 and len(shape) > 1 and shape[0] == _target_size(table, chain, number)):
        what = "the batch" if dim == 0 or is_batch else "positions and not classes"
        return (
            f"{name} runs over dimension {dim} of {list(shape)}, which is {what}: the probabilities of one sample do "
            "not add up to 1"
        )
    return ""


def _is_batch_alone(table: AxisTable, axes: Axes, dim: int) -> bool:
    """Check whether samples are in this dimension and in no other one."""
    others = [each for place, each in enumerate(axes) if place != dim and each]
    return bool(others) and table.is_batch(axes[dim]) and not any(map(table.is_batch, others))


def _is_last(chain: Chain, number: int) -> bool:
    """Check whether the loss is made of it without another layer in between."""
    behind = chain.descendants((number,)) & chain.of_loss
    return bool(behind) and not any(chain.name(each) in _LAYERS for each in behind)


_LAYERS = AFFINE | {"matmul", "bmm", "einsum", "mm", "lstm", "gru", "mul"}


def _target_size(table: AxisTable, chain: Chain, number: int) -> int | None:
    """The size of the target's first dimension; of what the model got, where what the model got is not known."""
    for each in chain.descendants((number,)):
        if chain.name(each) in LOSSES:
            return None if table.batch else (chain.taken(each, 1) or (None,))[0]
    first = next((shape for each in range(len(chain)) if (shape := chain.taken(each)) and len(shape) > 1), None)
    return first[0] if first and not table.batch else None


def _judge_weights(table: AxisTable, chain: Chain, number: int) -> str:
    """Weights that are normalised over one dimension, and summed over another one."""
    shape, dim = chain.taken(number), _dimension(chain, number)
    if chain.name(number) != "softmax" or shape is None or dim is None or len(shape) < 2:
        return ""
    summed = _summed(table, chain, number, dim)
    if not summed:
        return ""
    place, is_gate = summed[0][1], any(each.kind == "pick" for each, _ in summed)
    if _is_batch_alone(table, table.of(number), dim):
        return (
            f"Weights of shape {list(shape)} are normalised by softmax over dimension {dim}, in which samples are, and "
            f"{'the largest is picked' if is_gate else 'summed'} over another one: those of one sample do not add up "
            "to 1, and samples of a batch depend on each other"
        )
    is_plain = all(
        each.kind == "weights" or (each.kind == "product" and len(shape) > 2 and place == len(shape) - 1)
        or (each.kind == "pick" and place == len(shape) - 1 and _is_of_layer(chain, number))
        for each, place in summed
    )  # fmt: skip
    is_of_samples = any(table.is_batch(each.dim) for each, _ in summed)  # as that of soft clusters
    if not is_plain or (is_of_samples and not table.is_of_inputs(table.of(number)[dim])):
        return ""
    if is_gate:
        return (
            f"The weights of a gate, of shape {list(shape)}, are normalised by softmax over dimension {dim}, and the "
            f"largest is picked along dimension {place}: those of one sample do not add up to 1"
        )
    return (
        f"Attention weights of shape {list(shape)} are normalised by softmax over dimension {dim}, and summed over "
        f"dimension {place}: the weights of one sum do not add up to 1"
    )


def _judge_normalize(table: AxisTable, chain: Chain, number: int) -> str:
    """Vectors that are normalised along one dimension, and whose inner products run along another one."""
    shape = chain.taken(number)
    if chain.name(number) != "normalize" or shape is None or len(shape) < 2:
        return ""
    dim = 1 if argument_of(chain.listed[number], "dim") is None else _dimension(chain, number)
    summed = [] if dim is None else _summed(table, chain, number, dim)
    if not summed or any(each.kind == "pick" for each, _ in summed):
        return ""
    is_feature = all(not table.features.isdisjoint(table.roots(each.dim)) for each, _ in summed)
    is_batch = dim is not None and _is_batch_alone(table, table.of(number), dim)
    if any(table.is_batch(each.dim) for each, _ in summed) or not (is_feature or is_batch or len(shape) == 2):
        return ""
    return (
        f"normalize runs over dimension {dim} of {list(shape)}, and inner products over dimension {summed[0][1]}: the "
        "vectors that are multiplied do not have length 1"
    )


def _summed(table: AxisTable, chain: Chain, number: int, dim: int) -> list[tuple[Contraction, int]]:
    """Over which dimensions products with what is normalised are summed; empty where one is that along which it is.

    Returns:
        Each sum, and the place of its dimension in what was normalised.
    """
    axes, found = table.of(number), []
    for each in find_contractions(table, chain, number) or ():
        if not each.dim:  # of size 1: nothing is summed
            continue
        places = [place for place, own in enumerate(axes) if own and table.descends(each.dim, own)]
        if len(places) != 1 or places[0] == dim:
            return []
        found.append((each, places[0]))
    return found


def _is_of_layer(chain: Chain, number: int) -> bool:
    """Check whether it works on what a linear layer has made, the features of which are in the last dimension."""
    maker = chain.maker(number, 0, frozenset({"dropout", "to", "float", "add", "div", "mul"}))
    return chain.name(maker) == "linear" and chain.made(maker) == chain.taken(number)


def _judge_classes(_: AxisTable, chain: Chain, number: int) -> str:
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


def _judge_sequence(table: AxisTable, chain: Chain, number: int) -> str:
    """A recurrent layer, or attention, that runs along the samples of a batch, or along heads."""
    if chain.name(number) not in _SEQUENCE:
        return ""
    layers = find_attended(table, chain)
    own = next((each for each in layers if each.number == number), None)
    apart = own.apart[-1] if own is not None else ()
    if own is None or not own.along or not apart or any(_runs_along(table, each, apart) for each in layers):
        return ""
    shape = list(chain.taken(number, 0 if own.is_ordered else 1) or ())
    if chain.name(number) not in (*RECURRENT, ATTENTION):
        return _tell_heads(table, own, apart, shape)
    if _is_by_target(table, own):
        why = "outputs are compared with targets for each of its entries, so these are the samples"
    else:
        why = _name_position(table, chain, own)
    place = 0 if own.along == table.taken(number)[0] else 1
    return why and (
        f"{chain.name(number)} gets {shape} and runs along dimension {place}, "
        f"as if it were the sequence, and {why}: samples of a batch are mixed, and steps are kept apart"
    )


_SEQUENCE = (*RECURRENT, ATTENTION, "scaled_dot_product_attention", "softmax")


def _tell_heads(table: AxisTable, own: Attended, apart: Dim, shape: list[int]) -> str:
    """Attention along a dimension that was split off features, while steps are kept apart."""
    is_split = bool(table.roots(own.along) & table.features) and not table.roots(apart) & table.features
    if not is_split or len(own.apart) < 2 or not own.apart[0] or table.is_batch(apart):
        return ""
    return (
        f"Attention over keys of shape {shape} runs along a dimension that was split off the features, as heads are, "
        f"and the {apart[0].size} entries of the one before it are kept apart: steps of a sequence cannot see each "
        "other"
    )


def _runs_along(table: AxisTable, layer: Attended, dim: Dim) -> bool:
    return table.descends(layer.along, dim) or table.descends(dim, layer.along)


def _is_by_target(table: AxisTable, layer: Attended) -> bool:
    """Check whether outputs are compared with targets for each entry that it mixes, and for none that it does not."""
    samples = table.roots(layer.along) & table.targeted
    apart = table.roots(layer.apart[0])
    return len(samples) == 1 and any(
        table.samples_of(axes) == samples and not any(table.roots(dim) & apart for dim in axes)
        for axes in table.compared
    )


def _name_position(table: AxisTable, chain: Chain, layer: Attended) -> str:
    """Name the line at which positions are added along the other dimension; empty where there is none, or one here."""
    codes = [each for each in find_codes(table, chain) if each.number < layer.number and each.varies]
    along = [[table.descends(layer.along, each.axes[place]) for place in each.varies] for each in codes]
    apart = [[table.descends(layer.apart[0], each.axes[place]) for place in each.varies] for each in codes]
    if not table.is_batch(layer.along) or any(map(any, along)) or not any(map(all, apart)):
        return ""
    at = next(each for each, is_apart in zip(codes, apart, strict=True) if all(is_apart))
    return f"positions are added along the other one ({chain.listed[at.number].line.rpartition('/')[2]})"


def _judge_recurrent(_: AxisTable, chain: Chain, number: int) -> str:
    """The last step of a recurrent layer, or a mean over steps, taken along what it holds for the batch."""
    operation, shape = chain.listed[number], chain.taken(number)
    maker = operation.operands[0] if operation.operands else -1
    if maker < 0 or chain.name(maker) not in RECURRENT or shape is None or shape != chain.made(maker) or len(shape) < 3:
        return ""  # the last state is no course of steps
    batch = 0 if is_batch_first(chain, maker) else 1
    if _picked_dimension(chain, number) != batch:
        return ""
    order = "batch first" if not batch else "time first (batch_first is False)"
    return (
        f"The output of {chain.name(maker)} has shape {list(shape)}, {order}, and {_WHAT[chain.name(number)]} is "
        f"taken along dimension {batch}: over its {shape[batch]} sequences, and not over steps"
    )


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


_JUDGES = (_judge_softmax, _judge_weights, _judge_normalize, _judge_classes, _judge_sequence, _judge_recurrent)


@family.detector("reshape-mixes-batch")
@first_operation
def reshape_mixes(record: Record, chain: Chain, number: int, entry: Entry) -> Finding | None:
    """A reshape where a permutation is meant."""
    what = _mixes(chain, number) or _tears(axes_of(record, chain), chain, number)
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
    if chain.name(maker) in _TURNS:
        return ""
    if len(old) == len(new) > 1 and old != new and sorted(old) == sorted(new):
        return "samples and steps" if len(old) > 2 else "rows and columns"
    if _splits_across(old, new) or _splits_across(new, old):
        return "steps and heads"
    return ""


_TURNS = ("permute", "transpose", "t", "T", "mT", "movedim", "swapaxes")


def _tears(table: AxisTable, chain: Chain, number: int) -> str:
    """Describe what a reshape of activations mixes whose sizes fit no way to split and merge its dimensions."""
    if number not in table.mixed or table.is_free(number, 0) or not chain.listed[number].node:
        return ""
    maker = chain.listed[number].operands[0]
    dims = [dim for dim in table.taken(number) if dim]
    is_known = maker >= 0 and chain.name(maker) not in _TURNS and table.is_batch(dims[0])
    return "samples and features" if is_known else ""


def _splits_across(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Check whether ``(…, t, h·d)`` becomes ``(…, h, t, d)``."""
    if len(new) != len(old) + 1 or len(old) < 2:
        return False
    *rest, steps, features = old
    *same, heads, behind, size = new
    return rest == same and behind == steps != heads and heads * size == features
