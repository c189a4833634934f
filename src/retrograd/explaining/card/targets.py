"""What the losses were given as targets."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from retrograd.core.amounts import count_of
from retrograd.core.history.data_facts import SHIFTS, Targets
from retrograd.explaining.card.card import CardEntry
from retrograd.explaining.card.words import show, show_share
from retrograd.explaining.findings.record import Record


def describe_targets(record: Record) -> Iterator[CardEntry]:
    """What the losses were given as targets, by the loss and the line that called it."""
    found: dict[tuple[str, str], list[Targets]] = {}
    for fact in record.of(Targets):
        if fact.rank == record.first_rank:
            found.setdefault((fact.line, fact.loss), []).append(fact)
    for (line, _), looks in found.items():
        last, each = looks[-1], [look for look in looks if look.elements > look.ignored]
        shares = [look.share for look in each if not math.isnan(look.share)]
        shifts = [shift for place, shift in enumerate(SHIFTS) if each and all(_at(look, place) == 1 for look in each)]
        ignored = sum(look.ignored for look in looks)
        said = [f"{last.dtype}, {count_of(last.elements, 'element')} a batch" if last.dtype else ""]
        if last.classes:
            said.append(
                f"{last.classes:,} classes, of which a batch has {show(np.median([look.seen for look in looks]))}"
            )
        said += [f"the most frequent is {show_share(round(1000 * np.median(shares)), 1000)}"] if shares else []
        if ignored:
            said.append(f"{show_share(ignored, sum(look.elements for look in looks))} ignored")
        said += [_tell_shift(shift) for shift in shifts[:1]]
        said += ["the input itself, in the same memory"] if all(look.same for look in looks) else []
        if len(said) == 1:
            continue  # of numbers that are no classes all that a reader cares for is with the inputs
        yield CardEntry(
            topic="target",
            label=last.loss,
            text=", ".join(filter(None, said)),
            line=line,
            values={
                "loss": last.loss, "dtype": last.dtype, "elements": last.elements, "classes": last.classes,
                "ignored": ignored, "share": float(np.median(shares)) if shares else None, "shifts": shifts,
                "same": last.same, "looked": len(looks),
            },
        )  # fmt: skip


def _tell_shift(shift: int) -> str:
    """Where in the input the target stands: of next-token training one place ahead."""
    where = "at the same place" if not shift else f"{count_of(abs(shift), 'place')} {'ahead' if shift > 0 else 'back'}"
    return f"each the token {where}"


def _at(look: Targets, place: int) -> float:
    return look.shifts[place] if place < len(look.shifts) else -1.0
