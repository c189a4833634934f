"""Positions that are the same for a whole sequence, and results that nobody takes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.axes import Attended, AxisTable, Code, axes_of, find_attended, find_codes
from retrograd.explaining.findings.chain import MADE_BEFORE, Chain
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.record import CannotTell, Record

family = Family(__name__)


@family.detector("positions-shared")
def positions_shared(record: Record, entry: Entry) -> Iterator[Finding]:
    """A code of positions that does not vary along the sequence."""
    for chain in record.need_chains():
        table = axes_of(record, chain)
        layers, codes = find_attended(table, chain), find_codes(table, chain)
        for code in codes:
            found = next((each for each in layers if _is_shared(table, chain, code, each, layers, codes)), None)
            if found is not None:
                yield _tell(record, chain, code, found, entry)
                return


def _is_shared(
    table: AxisTable, chain: Chain, code: Code, layer: Attended, layers: list[Attended], codes: list[Code]
) -> bool:
    """Check whether a code is of positions, and the same for all entries that a layer of attention mixes."""
    if layer.is_ordered or layer.number < code.number or not layer.along or chain.name(code.number) != "add":
        return False
    is_meant = any(
        table.descends(layer.along, dim) for place, dim in enumerate(code.axes[:-1]) if dim and place not in code.varies
    )
    has_other = any(table.descends(layer.along, each.axes[place]) for each in codes for place in each.varies)
    return is_meant and not has_other and _is_position(table, chain, code, layers)


def _is_position(table: AxisTable, chain: Chain, code: Code, layers: list[Attended]) -> bool:
    maker = chain.listed[code.number].operands[code.operand]
    if maker < 0:
        return False
    if not code.varies:
        return _picked_row(chain, maker) in set(chain.made(code.number)[:-1])
    varying = [code.axes[place] for place in code.varies]
    is_of_samples = all(table.is_batch(dim) for dim in varying) and not any(
        table.descends(each.along, dim) for each in layers for dim in varying
    )
    own = [dim for dim in table.taken(code.number, code.operand)[:-1] if dim]
    is_counted = all(table.roots(dim) & table.ranges for dim in own)
    return is_of_samples and (is_counted or _is_sliced(chain, maker))


def _picked_row(chain: Chain, number: int) -> int:
    """The row, above 1, that an index picks of a table that was made before; 0 for none."""
    operation, table = chain.listed[number], chain.taken(number)
    found = re.fullmatch(r"\(?(?::, )?(\d+)(?:, :)?\)?", operation.arguments)
    is_row = chain.name(number) == "getitem" and operation.operands == (MADE_BEFORE,) and table is not None
    return int(found[1]) if found and is_row and int(found[1]) > 1 else 0


def _is_sliced(chain: Chain, number: int) -> bool:
    """Check whether it is the first rows of a table that was made before."""
    operation = chain.listed[number]
    is_slice = re.fullmatch(r"\(?:\d+(?:, :)*\)?", operation.arguments) is not None
    return chain.name(number) == "getitem" and operation.operands == (MADE_BEFORE,) and is_slice


def _tell(record: Record, chain: Chain, code: Code, layer: Attended, entry: Entry) -> Finding:
    added, size = chain.listed[code.number], layer.along[0].size
    makers = sorted(chain.ancestors(added.operands[code.operand]))
    begun = next((each for each in makers if chain.name(each) == "arange"), makers[-1])
    table = next((each for each in makers if chain.name(each) == "embedding"), code.number)
    return entry.finding(
        f"Positions of shape {list(chain.taken(code.number, code.operand) or ())} are added to "
        f"{list(chain.made(code.number))}, so all {size} entries of a sequence get the same one, while attention runs "
        "along them",
        site=chain.listed[table].module,
        step=chain.step,
        line=chain.listed[begun].line,
        evidence=[
            ("positions", f"{chain.name(begun)}({chain.listed[begun].arguments})"),
            ("added at", added.line.rpartition("/")[2]),
            ("entries that attention mixes", size),
        ],
    )


@family.detector("result-dropped")
def result_dropped(record: Record, entry: Entry) -> Iterator[Finding]:
    """A function that makes a new tensor, called as if it wrote into the one that it is given."""
    chains = record.need_chains()
    if all(chain.fact.dropped is None for chain in chains):
        raise CannotTell("which results are thrown away was not recorded")
    for chain in chains:
        for number in chain.fact.dropped or ():
            operation = chain.listed[number]
            if chain.name(number) not in _WITHOUT_EFFECT or not (user := _later_user(chain, number)):
                continue
            yield entry.finding_at(
                record,
                chain,
                number,
                f"{operation.name} returns a new tensor, and the statement that calls it throws that away: "
                f"{operation.takes[0]} goes on unchanged to {chain.name(user)}",
                severity="critical" if chain.name(number) in _MASKS else None,
                line=operation.line,
                evidence=[("called as", f"{operation.name}({operation.arguments})"), ("taken by", "no operation")],
                repair=f"assign the result, x = x.{operation.name}(…), or write into x with {operation.name}_ where "
                "it needs no gradient.",
            )
            return


def _later_user(chain: Chain, number: int) -> int:
    """An operation, of those the loss or an output is made of, that takes the same tensor later on; 0 for none."""
    operand = chain.listed[number].operands[0]
    wanted = chain.of_loss | chain.of_outputs
    return next((each for each in chain.users(operand) if each > number and each in wanted), 0) if operand >= 0 else 0


_MASKS = frozenset({"masked_fill", "masked_scatter", "where", "tril", "triu"})

_WITHOUT_EFFECT = _MASKS | frozenset(
    {
        "add", "sub", "mul", "div", "pow", "neg", "abs", "exp", "log", "sqrt", "clamp", "clip", "clamp_min",
        "clamp_max", "relu", "leaky_relu", "elu", "gelu", "silu", "tanh", "sigmoid", "softplus", "dropout", "softmax",
        "log_softmax", "normalize", "layer_norm", "nan_to_num", "scatter", "scatter_add", "scatter_reduce",
        "index_fill", "index_add", "index_copy", "index_put", "detach", "squeeze", "unsqueeze", "transpose", "permute",
        "flatten", "view", "reshape"
    }
)  # fmt: skip
"""Functions that do nothing but return a result."""
