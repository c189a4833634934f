"""Why gradients are exactly zero, as a pass told that was followed."""

from __future__ import annotations

from collections.abc import Sequence

from retrograd.core.history.saved_facts import ZeroGradient
from retrograd.core.runs.findings import shorten_line
from retrograd.explaining.findings.record import Record

BOUNDED = ("clamp", "clip", "hardtanh", "relu6", "hardsigmoid", "threshold", "clamp_min", "clamp_max")


def find_zero(record: Record, names: Sequence[str]) -> ZeroGradient | None:
    """Where the gradients of most of these became zero; None where that was not followed."""
    found = [each for each in record.of(ZeroGradient) if set(each.parameters) & set(names)]
    return max(found, key=lambda each: (each.value, -each.step), default=None)


def explain_zero(fact: ZeroGradient | None) -> tuple[str, str]:
    """The kind of reason, as the table has it, and the reason in words; both are empty where it is not known."""
    if fact is None:
        return "", ""
    what = f"`{fact.operation}`" if fact.operation else fact.node
    what += f" ({shorten_line(fact.line)})" if fact.line else ""
    is_bounded = fact.operation.strip("_") in BOUNDED
    bounds = f" ({fact.arguments})" if fact.arguments and "=False" not in fact.arguments else ""
    reasons = {
        "dead units": (
            f"all that {what} takes lies outside of its bounds{bounds}, where its derivative is zero"
            if is_bounded
            else f"all that {what} takes is where its derivative is zero"
        ),
        "step function": f"{what} is flat, its derivative is zero everywhere",
        "saturated": f"{what} is saturated: its derivative is zero at all that it takes",
        "not picked": f"{what} takes none of what they made",
        "zero factor": f"{what} multiplies what they made by zero",
        "cancels": f"the gradients of the two operands of {what} add up to exactly zero",
        "no derivative": f"{what} gives no gradient",
        "hook": f"a hook behind {what} made it zero",
    }
    kind = "clamped" if fact.why == "dead units" and is_bounded else fact.why
    return kind if fact.why in reasons else "", reasons.get(fact.why, f"{what} was given a gradient, and gave zeros")
