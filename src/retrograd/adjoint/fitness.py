"""Whether what a call returns can be differentiated at all: it is finite, and the same each time."""

from __future__ import annotations

from retrograd.adjoint.module_call import ModuleCall
from retrograd.adjoint.row import Verdict
from retrograd.adjoint.vectors import count_not_finite


def find_unfitness(call: ModuleCall) -> tuple[Verdict, str] | None:
    """What speaks against it, and why; None where nothing does."""
    bad, total = count_not_finite(call.outputs)
    if bad:
        given, _ = count_not_finite([variable.tensor for variable in call.variables])
        source = "so is what it is given" if given else "all that it is given is finite"
        return Verdict.NOT_FINITE, f"{bad:,} of {total:,} numbers that it returns are not finite; {source}"
    if not call.is_function():
        return Verdict.RANDOM, "it returns something else each time, for the same input and random state"
    return None
