"""What was minimised."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from retrograd.explaining.card.card import CardEntry
from retrograd.explaining.card.words import show
from retrograd.explaining.findings.chain import Chain, argument_of
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import Training


def describe_losses(record: Record) -> Iterator[CardEntry]:
    """What backward passes began from, by the line that made it; its values where there is one alone."""
    found: dict[str, str] = {}
    for chain in record.chains:
        root = record.root_of(chain)
        if root >= 0:
            found.setdefault(record.place_of(chain, root)[1], _write(chain, root))
    training = record.once(Training)
    first, last, lost = training.initial, training.late, training.lost
    curve, values = "", {}
    if len(found) <= 1 and np.isfinite(first) and _is_one(training):
        ended = show(last) if lost is None else f"not finite from step {lost:,} on"
        curve, values = f"{show(first)} → {ended}", {"first": first, "last": last, "lost": lost}
    for line, text in found.items():
        yield CardEntry(
            topic="loss", text="; ".join(filter(None, (text, curve))), line=line, values={"expression": text, **values}
        )
    if curve and not found:
        yield CardEntry(topic="loss", text=curve, values=values)


def _is_one(training: Training) -> bool:
    """Check whether all losses of the run are of one thing."""
    try:
        training.need_loss()
    except CannotTell:
        return False
    return True


def _write(chain: Chain, number: int) -> str:
    """The last operations of a loss."""
    operation = chain.listed[number]
    operands = [_name(chain, each) for each in chain.operands(number)]
    reduction = argument_of(operation, "reduction") or ""
    return f"{chain.name(number)}({', '.join(filter(None, (*operands, reduction)))})"


def _name(chain: Chain, number: int) -> str:
    module = chain.listed[number].module
    return f"{module}(…)" if module else f"{chain.name(number)}(…)"
