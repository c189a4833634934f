"""What the program calls from one update to the next, and in which modes it calls its models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from retrograd.core.amounts import count_of, list_names
from retrograd.core.history.facts import Call, Modes
from retrograd.core.runs.findings import shorten_line
from retrograd.core.sites.site import ROOT
from retrograd.explaining.card.card import CardEntry
from retrograd.explaining.card.words import is_idle, label_of
from retrograd.explaining.findings.coverage import Coverage
from retrograd.explaining.findings.record import Record
from retrograd.explaining.findings.updates import BY_HAND, Update, by_optimizer

_MOST_CALLS, _LONGEST = 12, 8
"""Different calls of an update that are listed; calls that are said to be repeated."""

_HELD = {"none": "empty", "zero": "zero", "some": "not empty"}


def describe_cycle(record: Record) -> Iterator[CardEntry]:
    """What is called from one update to the next, as most have it.

    Of optimizers that take turns, from one update to the next of that which makes the fewest; of those that no such
    cycle holds, as where one follows the other, each by itself.
    """
    of_each = by_optimizer(record.updates)
    if not of_each and record.calls and not record.called("backward"):
        yield CardEntry(topic="update", text="none: no backward pass was recorded", values={"updates": 0})
    cycles = dict[str, tuple[list[Update], set[str]]]()
    while of_each:
        optimizer, updates = min(reversed(of_each.items()), key=lambda each: len(each[1]))  # the last of a turn
        looked = updates[1:] or updates  # what came before the first may not be known
        inside = {call.about for update in looked for call in update.before if call.name in ("step", "scaler.step")}
        cycles[optimizer] = looked, inside
        of_each = {name: some for name, some in of_each.items() if name not in (optimizer, *inside)}
    for optimizer, (looked, inside) in sorted(cycles.items(), key=lambda each: each[1][0][0].step):
        entry = _describe_cycle(record, optimizer, looked, several=bool(inside - {optimizer}))
        yield replace(entry, label=optimizer) if len(cycles) > 1 else entry


def _describe_cycle(record: Record, optimizer: str, looked: Sequence[Update], *, several: bool) -> CardEntry:
    models = len(record.models) > 1
    named = [_list_calls(update, several=several, models=models) for update in looked]
    if 2 * Counter(named).most_common(1)[0][1] < len(named):  # as many as it takes: how often tells nothing
        named = [_squeeze(calls) for calls in named]
    (calls, followed), *others = Counter(named).most_common(4)
    usual = looked[named.index(calls)]
    held = Counter(str(first.details.get("held", "")) for each in looked for first in each.named("backward")[:1])
    clears = list(dict.fromkeys(call.line for call in record.called("zero_grad")))
    text = " → ".join(_fold(calls))
    text += f" (so in {followed:,} of the {len(looked):,} updates after the first)" if others else ""
    text += "; updated without an optimizer of torch" if optimizer == BY_HAND else ""
    if "zero_grad" not in calls:
        before = _HELD.get(held.most_common(1)[0][0] if held else "", "")
        text += "; zero_grad is called elsewhere" if clears else "; no zero_grad was seen"
        text += f", .grad was {before} before backward" if before else ""
    return CardEntry(
        topic="update",
        text=text,
        line=usual.call.line,
        details=(
            *(f"in {count_of(n, 'update')}: {' → '.join(_fold(each))}" for each, n in others),
            *(f"zero_grad is called at {shorten_line(line)}" for line in clears),
        ),
        values={
            "calls": calls, "updates": len(looked), "followed": followed, "zero_grad": clears,
            "backwards": sum(call.name == "backward" for call in usual.before), "by_hand": optimizer == BY_HAND,
        },
    )  # fmt: skip


def _list_calls(update: Update, *, several: bool, models: bool) -> tuple[str, ...]:
    """The calls of an update, from the first of its loop on: what stands below ``step`` there comes last."""
    calls = [*update.before, *([] if update.optimizer == BY_HAND else [update.call])]
    file, _, number = update.call.line.rpartition(":")
    behind = 0
    for call in update.before:
        where, _, at = call.line.rpartition(":")
        is_earlier = where != file or not at.isdigit() or int(at) < int(number or 0)
        if is_earlier or (at == number and call.name != "scheduler.step"):
            break
        behind += 1
    return tuple(_name(call, several=several, models=models) for call in (*calls[behind:], *calls[:behind]))


def _name(call: Call, *, several: bool, models: bool) -> str:
    if call.name == "forward":
        blind = "" if call.details.get("grad", True) else " without grad"
        mode = "" if call.details.get("training", True) else " in eval mode"
        return f"forward{f' of {call.about}' if models else ''}{blind}{mode}"
    return f"{call.name} of {call.about}" if several and call.name == "step" else call.name


def _fold(calls: Sequence[str]) -> list[str]:
    """Calls with what is repeated said once: ``4 × (forward → backward)``."""
    found, place = list[str](), 0
    while place < len(calls):
        counts = {size: _count(calls, place, size) for size in range(1, _LONGEST + 1)}
        size = max(counts, key=lambda size: size * (counts[size] if counts[size] > 1 else 0))
        if counts[size] < 2:
            found.append(calls[place])
            place += 1
            continue
        block = _fold(calls[place : place + size])
        found.append(f"{counts[size]} × {block[0] if len(block) == 1 else '(' + ' → '.join(block) + ')'}")
        place += size * counts[size]
    return found if len(found) <= _MOST_CALLS else [*found[: _MOST_CALLS - 2], "…", found[-1]]


def _squeeze(calls: Sequence[str]) -> tuple[str, ...]:
    """Calls in which one that is repeated stands once: ``n × forward``."""
    runs = [(name, len(list(some))) for name, some in groupby(calls)]
    return tuple(f"n × {name}" if times > 1 else name for name, times in runs)


def _count(calls: Sequence[str], place: int, size: int) -> int:
    block, times = calls[place : place + size], 1
    while len(block) == size and calls[place + times * size : place + (times + 1) * size] == block:
        times += 1
    return times


def describe_modes(record: Record) -> Iterator[CardEntry]:
    """How each model was called: in training or eval mode, with or without grad."""
    found: dict[str, dict[tuple[bool, bool], list[Call]]] = {}
    for call in record.called("forward"):
        mode = bool(call.details.get("training", True)), bool(call.details.get("grad", True))
        found.setdefault(call.about or ROOT, {}).setdefault(mode, []).append(call)
    for model, modes in sorted(found.items(), key=lambda each: is_idle(record, each[0])):
        listed = [
            {
                "training": mode[0],
                "grad": mode[1],
                "calls": len(calls),
                "steps": _count_steps(record, calls, grad=mode[1]),
            }
            for mode, calls in sorted(modes.items(), key=lambda each: -len(each[1]))
        ]
        blind = [calls[-1] for (_, grad), calls in modes.items() if not grad]
        facts = [fact for fact in record.of(Modes) if fact.name == model and model in fact.training]
        inside = list(dict.fromkeys(path for fact in facts for path in fact.evaluating))
        said = [
            f"{count_of(each['calls'], 'forward')} in {'training' if each['training'] else 'eval'} mode "
            f"{'with' if each['grad'] else 'without'} grad"
            + (
                f" (in {count_of(each['steps'], 'step' if each['grad'] else 'round')})"
                if each["steps"] != each["calls"]
                else ""
            )
            for each in listed
        ]
        said += [f"in eval mode within it: {list_names(inside, 2)}"] if inside else []
        said += [] if blind else ["never called without grad"]
        yield CardEntry(
            topic="modes",
            label=label_of(record, model),
            text="; ".join(said),
            line=blind[0].line if blind else "",
            values={"model": model, "forwards": listed, "evaluating": inside},
        )


def _count_steps(record: Record, calls: Sequence[Call], *, grad: bool) -> int:
    """In how many steps they were: with grad of those that were made, else also behind the last."""
    last = record.once(Coverage).last if grad else None
    return len({call.step if last is None else min(call.step, last) for call in calls})
