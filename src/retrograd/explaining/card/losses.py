"""What was minimised, and what the losses were given as targets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from retrograd.core.amounts import count_of
from retrograd.core.groups import gather
from retrograd.core.history.data_facts import SHIFTS, Targets
from retrograd.core.runs.loss_curve import reduce_curve
from retrograd.explaining.card.card import CardEntry
from retrograd.explaining.card.words import show, show_change, show_share
from retrograd.explaining.findings.chain import factor_of
from retrograd.explaining.findings.loss_terms import Loss, Term, describe_loss, write
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import Training

_LONGEST = 200
"""Letters of an expression on a line."""

_DEEP, _FLAT = 5, 2
"""Operations within one another that are written; so many at least, however long the expression is."""

_REPEATED = re.compile(r"([\w.]+\([^()]*\)|\bdata|…)(?:, \1)+")
"""The same operand several times."""

_EXACT = re.compile(r"\d+\.\d{4,}(?:e-?\d+)?")
"""A number with more digits than are read."""


def describe_losses(record: Record) -> Iterator[CardEntry]:
    """What backward passes began from, by the line that made it; its values where all are of one loss."""
    losses, training = [each for each in describe_loss(record) if _is_minimised(record, each)], record.once(Training)
    first, last, lost = training.initial, reduce_curve(training.loss).final, training.lost
    curve, values = "", {}
    if len(losses) <= 1 and np.isfinite(first) and _is_one(training):
        ended = show(last) if lost is None else f"not finite from step {lost:,} on"
        curve, values = f"{show(first)} → {ended}", {"first": first, "last": last, "lost": lost}
    for loss in losses:
        text = _write(record, loss)
        short = text if len(text) <= _LONGEST else f"{text[:_LONGEST].rpartition(' ')[0]} …"
        yield CardEntry(
            topic="loss",
            text="; ".join(filter(None, (short, curve))),
            line=_find_line(record, loss),
            details=(text,) if short != text else (),
            values={
                "expression": loss.text,
                "terms": [
                    {
                        "expression": each.text,
                        "sign": each.sign,
                        "line": each.line,
                        "gradient": each.has_graph,
                        "share": share,
                    }
                    for each, share in zip(loss.terms, _weigh(loss), strict=True)
                ],
                **values,
            },
        )
    if not losses and record.called("backward"):
        why = "not known, because no operation that it was made of was recorded"
        yield CardEntry(topic="loss", text="; ".join(filter(None, (why, curve))), values=values)


def _is_minimised(record: Record, loss: Loss) -> bool:
    """Check whether backward began from it: a gradient that a loss is made of, as a penalty, is none."""
    taken = {call.line for call in record.called("grad")} - {call.line for call in record.called("backward")}
    return loss.called not in taken


def _find_line(record: Record, loss: Loss) -> str:
    """Where the program makes a loss: of one that a package makes, where a term is made, or the model is called."""
    lines = [loss.line, *(term.line for term in loss.terms), *(call.line for call in record.called("forward")[:1])]
    return next((line for line in lines if "/site-packages/" not in line), loss.line)


def _is_one(training: Training) -> bool:
    """Check whether all losses of the run are of one thing."""
    try:
        training.need_loss()
    except CannotTell:
        return False
    return True


def _weigh(loss: Loss) -> list[float | None]:
    """The share of each term in the sizes of all, over all passes that were looked at; None where it is not known."""
    sizes = [math.fsum(map(abs, each.values)) if each.values else math.nan for each in loss.terms]
    total = math.fsum(sizes)
    return [size / total if total > 0 else None for size in sizes]


def _write(record: Record, loss: Loss) -> str:
    """The expression of a loss, with the share of each of several terms, and those that no gradient passes."""
    texts = (_join(record, loss, deep) for deep in range(_DEEP, _FLAT, -1))
    return next((text for text in texts if len(text) <= _LONGEST), "") or _join(record, loss, _FLAT)


def _join(record: Record, loss: Loss, deep: int) -> str:
    """The terms of a loss; those that follow each other and are written the same are one, with how many they are."""
    shares, alike = _weigh(loss), dict[tuple[str, str, int], list[float | None]]()
    for term, share in zip(loss.terms, shares, strict=True):
        alike.setdefault((*_spell(record, loss, term, deep), term.sign), []).append(share)
    text = ""
    for (told, note, sign), some in alike.items():
        known = [share for share in some if share is not None] if len(alike) > 1 else []
        notes = [note] if note else []
        notes += [show_share(round(1000 * math.fsum(known)), 1000)] if known else []
        text += (" − " if sign < 0 else " + ") if text else "−" * (sign < 0)
        text += f"({told} + …, {len(some)} such terms)" if len(some) > 1 else told
        text += f" [{', '.join(notes)}]" if notes else ""
    return text


def _spell(record: Record, loss: Loss, term: Term, deep: int) -> tuple[str, str]:
    """A term in words, and what is to be said of it: a weight that changes, that no gradient passes."""
    chain, note = loss.chain, "" if term.has_graph else "no gradient"
    module = chain.listed[term.number].module if term.number >= 0 else ""
    weight = term.text.removesuffix(write(record, chain, term.number, module))
    inner, weights = _find_weights(loss, term)
    varies = len(weights) > 1 and max(weights) - min(weights) > 0.01 * max(map(abs, weights))
    if varies:
        note = f"w {show_change([abs(weights[0]), abs(weights[-1])])}"
        weight, module = "w · ", chain.listed[inner].module
    told = f"{weight}{write(record, chain, inner if varies else term.number, module, deep)}"
    told = _REPEATED.sub(r"\1, …", told).replace("…, …", "…")
    return _EXACT.sub(lambda found: show(float(found[0])), told), note


def _find_weights(loss: Loss, term: Term) -> tuple[int, list[float]]:
    """What a term weights, and by how much in each pass: its expression has the weight of the pass that was noted."""
    chain, inner = loss.chain, term.number
    if chain.name(inner) == "mul" and not factor_of(chain, inner) and any(term.values):
        inner = chain.operands(inner)[0] if chain.operands(inner) else inner
    is_number = inner >= 0 and math.prod(chain.made(inner)) == 1 and "w · " not in term.text
    sums = [(parts.sum_of(term.top), parts.sum_of(inner)) for parts in loss.parts] if is_number else []
    return inner, [top / below for top, below in sums if below and math.isfinite(top / below)]


# ---- targets ----


def describe_targets(record: Record) -> Iterator[CardEntry]:
    """What the losses were given as targets, by the loss and the line that called it."""
    mine = (fact for fact in record.of(Targets) if fact.rank == record.first_rank)
    for (line, _), looks in gather(((fact.line, fact.loss), fact) for fact in mine).items():
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
