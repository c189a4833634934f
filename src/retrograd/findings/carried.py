"""What is carried over from one step to the next with its graph."""

from __future__ import annotations

from retrograd.findings.chain import Chain
from retrograd.findings.finding import shorten_line
from retrograd.findings.record import Record
from retrograd.history.facts import Operation


def tell_carried(record: Record, chain: Chain) -> tuple[str, str] | None:
    """The first operation that takes a tensor with a graph that was made before all of them.

    Returns:
        That as a sentence, and the line at which it is handed in: that of the model's call, where the model was called
        with such a tensor or returns one. None where there is no such tensor.
    """
    if not chain.carried:
        return None
    operation, taken = chain.carried[0]
    given = {f"{each.dtype}{list(each.shape)}" for looks in record.inputs.values() for each in looks}
    given |= {made for number in chain.outputs for made in chain.listed[number].makes}
    calls = [each.line for each in record.calls if each.name == "forward" and each.step == chain.step]
    is_given = operation.module and taken in given and calls
    return tell_taken(operation, taken), calls[-1] if is_given else operation.line


def tell_taken(operation: Operation, taken: str) -> str:
    """Which operation takes what."""
    where = f" ({shorten_line(operation.line)})" if operation.line else ""
    return f"`{operation.name}`{where} takes {taken} that was made before this forward"
