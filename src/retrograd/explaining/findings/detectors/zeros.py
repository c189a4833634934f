"""Gradients that are exactly zero in all steps, and the operation that makes them so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from retrograd.core.amounts import list_names
from retrograd.core.history.saved_facts import ZeroGradient
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.chain import name_of
from retrograd.explaining.findings.detectors.missing_gradients import root_of
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.gradients import LOOSE, ParameterGradients, path_of
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.zero_gradients import explain_zero, find_zero

family = Family(__name__)

FEWEST = 4
"""Recorded steps with a gradient; our own choice."""

_SATISFIED = ("dead units", "not picked")
"""Why the gradient of a loss is zero that has reached zero, as a hinge does."""

_ROUNDED = ("zero factor", "saturated", "zero")
"""Why a gradient may seem to become zero that is too small for half precision."""


@family.detector("zero-gradient")
def zero_gradient(record: Record, entry: Entry) -> Iterator[Finding]:
    """All that an optimizer holds, or all of a model, gets nothing but zeros."""
    gradients = record.once(ParameterGradients)
    record.need_optimizers()
    names = [name for name in sorted(gradients.held) if gradients.steps.get(name, (0, 0))[0] >= FEWEST]
    if not names:
        raise CannotTell(f"no parameter's gradient was recorded in {FEWEST} steps")
    zero = {name for name in names if not gradients.steps[name][1] and not name.startswith(LOOSE)}
    for group in _list_groups(record, names):
        if set(group) <= zero:
            fact = find_zero(record, group)
            if fact is None or not (_is_satisfied(record, fact) or _is_rounded(record, fact)):
                yield _describe(entry, record, group, fact, is_all=set(names) <= zero)
            return


def _list_groups(record: Record, names: Sequence[str]) -> Iterator[list[str]]:
    """All parameters; those of each optimizer; those of each model."""
    yield list(names)
    for made in record.optimizers.values():
        if (held := [name for name in names if name in made.parameters]) and not made.unknown:
            yield held
    for root in sorted(record.models):
        if mine := [name for name in names if root_of(record, name) == root]:
            yield mine


def _is_satisfied(record: Record, fact: ZeroGradient) -> bool:
    """Check whether the loss is nothing but zero because there is nothing left to gain."""
    return fact.why in _SATISFIED and len(record.loss.values) > 0 and not record.loss.values.any()


def _is_rounded(record: Record, fact: ZeroGradient) -> bool:
    """Check whether it may be too small for half precision, which is no fault of that operation."""
    if fact.why not in _ROUNDED:
        return False
    listed = [each for chain in record.chains for each in chain.listed]
    mine = [each for each in listed if each.line == fact.line and each.name == fact.operation]
    return any(text.startswith("float16") for each in mine or listed for text in (*each.takes, *each.makes))


def _describe(
    entry: Entry, record: Record, names: Sequence[str], fact: ZeroGradient | None, *, is_all: bool
) -> Finding:
    gradients = record.once(ParameterGradients)
    steps = max(gradients.steps[name][0] for name in names)
    whose = "of all parameters" if is_all else f"of {list_names(list(names), 2)}"
    so = "nothing is trained" if is_all else "they are not trained"
    case, reason = explain_zero(fact)
    return entry.finding(
        f"The gradients {whose} are exactly zero in all of {steps} recorded steps, so {so}"
        f"{f': {reason}' if reason else ''}",
        case=case,
        site=path_of(names[0] if fact is None else fact.parameters[0]),
        span=record,
        line=_find_line(record, fact) if fact is not None else record.line_of(path_of(names[0])),
        evidence=[
            ("steps in which a gradient was not zero", 0, f"of {steps}"),
            ("parameters", len(names)),
            *([("node that was given a gradient, and gave zeros", fact.node)] if fact is not None else []),
        ],
    )


def _find_line(record: Record, fact: ZeroGradient) -> str:
    """Where it was called; of a difference of equals, where the second of them was made."""
    if fact.why == "cancels":
        for chain in record.chains:
            for number, each in enumerate(chain.listed):
                maker = chain.maker(number, 1)
                if each.line == fact.line and name_of(each) in ("sub", "div") and maker >= 0:
                    return chain.listed[maker].line or fact.line
    return fact.line
