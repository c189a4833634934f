"""Gradients that add up wrongly: never cleared, cleared before they are used, counted twice, or not divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import pairwise

import numpy as np

from retrograd.core.groups import gather
from retrograd.core.history.facts import Call
from retrograd.core.history.sink import Event
from retrograd.core.runs.findings import Finding, Severity
from retrograd.explaining.findings.chain import Chain
from retrograd.explaining.findings.division import is_divided_behind, is_divided_by, judge_losses
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import is_adaptive, number
from retrograd.explaining.findings.updates import BY_HAND, HABIT, Update, clears, count_passes, list_cleared_passes

family = Family(__name__)

MOSTLY = 0.5
"""Share of the updates that must be concerned. A habit, not one step; our own choice."""

HELD = {"some", "unknown"}
"""Contents of ``.grad`` before a backward pass that adds to it."""

FEWEST = 3
"""Updates after which gradients that were never cleared are told from a warm-up."""


@family.detector("missing-zero-grad")
def missing_zero_grad(record: Record, entry: Entry) -> Iterator[Finding]:
    """Gradients are never cleared."""
    updates_of = record.updates_by_program()
    cleared = {name for name, updates in updates_of.items() if any(_is_cleared(each, record) for each in updates)}
    for optimizer, updates in updates_of.items():
        later = [update for update in updates if not update.is_first and update.named("backward")]
        stale = [update for update in later if _adds(update, record)]
        others = cleared - {optimizer}
        if others and optimizer not in cleared:  # what .grad held was asked of parameters of all of them
            stale = [update for update in later if update.named("backward")[-1].details.get("held") in HELD]
        if len(stale) >= FEWEST and len(stale) > MOSTLY * len(later):
            yield _describe_missing_zero_grad(entry, optimizer, stale, later)


def _describe_missing_zero_grad(entry: Entry, optimizer: str, stale: list[Update], later: list[Update]) -> Finding:
    is_never = len(stale) == len(later)
    how = "never" if is_never else "mostly not"
    whose = f"updates of {optimizer}" if optimizer else "updates by hand"
    held = {str(call.details.get("held", "")) for update in stale for call in update.named("backward")}
    seen = ", and .grad was neither None nor zero when backward began" if held == {"some"} else ""
    return entry.finding(
        f"Gradients are {how} cleared: {'all' if is_never else f'{len(stale)} of the'} {len(later)} {whose} after the "
        "first add to what the batches before had left in .grad, so each is made of their sum",
        site=optimizer,
        step=0 if is_never else stale[0].step,
        last_step=stale[-1].step,
        line=stale[0].named("backward")[-1].line,
        evidence=[
            ("updates without zero_grad before them", len(stale), f"> {MOSTLY:g} of {len(later)}"),
            (".grad when backward began", str(stale[-1].named("backward")[0].details.get("held", ""))),
        ],
        checked=[f"nothing cleared the gradients before these updates{seen}"],
    )


def _adds(update: Update, record: Record) -> bool:
    held = {call.details.get("held") for call in update.named("backward")}
    return held <= HELD and not _is_cleared(update, record)


def _is_cleared(update: Update, record: Record) -> bool:
    return any(clears(call, update.optimizer, record.optimizers) for call in update.before)


@family.detector("zero-grad-misplaced")
def misplaced_zero_grad(record: Record, entry: Entry) -> Iterator[Finding]:
    """Gradients are cleared between backward and the update."""
    for optimizer, updates in record.updates_by_program().items():
        cleared = [update for update in updates if _find_clearing(update, record) is not None]
        lost = [update for update in updates if list_cleared_passes(update, record.optimizers)]
        if optimizer != BY_HAND and cleared and len(cleared) > MOSTLY * len(updates):
            yield _describe_cleared(entry, optimizer, cleared, len(updates), record)
        elif len(lost) > MOSTLY * len(updates) and is_divided_by(record, count_passes(updates)):
            yield _describe_lost(entry, optimizer, lost, len(updates), record)


def _describe_cleared(entry: Entry, optimizer: str, cleared: list[Update], among: int, record: Record) -> Finding:
    call = _find_clearing(cleared[0], record)
    return entry.finding(
        f"{optimizer} is given cleared gradients: zero_grad is called between backward and step before "
        f"{len(cleared)} of {among} updates, so nothing is learned",
        case="cleared",
        site=optimizer,
        span=cleared,
        line=call.line if call else "",
        evidence=[("updates from cleared gradients", len(cleared), f"> {MOSTLY:g} of {among}")],
        checked=[f"what is cleared are the parameters of {optimizer}"],
    )


def _describe_lost(entry: Entry, optimizer: str, lost: list[Update], among: int, record: Record) -> Finding:
    passes = lost[-1].named("backward")
    unused = list_cleared_passes(lost[-1], record.optimizers)
    return entry.finding(
        f"zero_grad is called between the micro-batches of {optimizer}: of {len(passes)} backward passes before "
        f"an update the gradients of {len(unused)} are cleared, though the loss is divided for their sum",
        case="lost",
        site=optimizer,
        span=lost,
        line=next((call.line for call in lost[-1].before if clears(call, optimizer, record.optimizers)), ""),
        evidence=[("updates before which gradients are cleared unused", len(lost), f"> {MOSTLY:g} of {among}")],
    )


def _find_clearing(update: Update, record: Record) -> Call | None:
    if not update.named("backward"):
        return None
    behind = update.after_last("backward")
    return next((call for call in behind if clears(call, update.optimizer, record.optimizers)), None)


# ---- more passes than there should be, or than the loss was divided by ----

CUT = 0.1
"""Share of clipped sums of micro-batches above which clipping tells that they are not means; our own choice."""

MANY_OPTIMIZERS = 2
"""With so many, several passes before an update are usual (GANs)."""


@family.detector("double-backward")
def double_backward(record: Record, entry: Entry) -> Iterator[Finding]:
    """A loss is differentiated twice before an update."""
    part, steps = _find_part(record), record.loss.steps
    for optimizer, updates in record.updates_by_program().items():
        meant = [update for update in updates if update.named("backward")]
        seen = int(np.isin([update.step for update in meant], steps).sum())
        several = [update for update in meant if len(update.named("backward")) > 1]
        losses = _losses_by_step(record, {update.step for update in several})
        doubled = [update for update in several if _is_doubled(losses.get(update.step, []))]
        if doubled and len(doubled) >= HABIT * seen:
            value, times = _most_common(losses[doubled[0].step])
            yield _describe_double_backward(
                entry,
                optimizer,
                doubled,
                f"Backward runs {times} times from the same loss ({value:.4g}) before {len(doubled)} of "
                f"{seen} updates, so gradients are {times} times as large as meant",
                "passes of one micro-batch begin from the same value, which is not zero",
            )
        elif part and several and len(several) >= HABIT * len(meant):
            yield _describe_double_backward(
                entry,
                optimizer,
                several,
                f"Backward runs from {part}, and then from a sum that holds it, before {len(several)} of "
                f"{len(meant)} updates, so its gradients count twice",
                "the sum was seen to be made of it",
            )


def _describe_double_backward(
    entry: Entry, optimizer: str, doubled: list[Update], message: str, checked: str
) -> Finding:
    passes = doubled[0].named("backward")
    return entry.finding(
        message,
        site=optimizer,
        span=doubled,
        line=passes[-1].line,
        evidence=[("passes before an update", len(passes), "> 1"), ("line of the first", passes[0].line)],
        checked=[checked],
    )


def _find_part(record: Record) -> str:
    """Name the loss that a pass begins from and a later pass of the step holds as a term of a sum; empty for none."""
    for before, behind in pairwise(record.chains):
        is_same = before.step == behind.step and behind.listed[: len(before)] == before.listed
        if is_same and 0 <= before.loss != behind.loss and before.loss in _terms(behind, behind.loss):
            return before.name(before.loss)
    return ""


def _terms(chain: Chain, number: int) -> set[int]:
    """The operations that a sum is made of, itself left out."""
    if number < 0 or chain.name(number) != "add":
        return set()
    return {each for term in chain.operands(number) for each in (term, *_terms(chain, term))}


def _losses_by_step(record: Record, steps: Collection[int]) -> dict[int, list[Event]]:
    return gather((event.moment.step, event) for event in (record.history.losses_at(steps) if steps else ()))


def _most_common(losses: list[Event]) -> tuple[float, int]:
    return Counter(event.value for event in losses).most_common(1)[0]


def _is_doubled(losses: list[Event]) -> bool:
    """Check whether passes of one micro-batch begin from the same value that is not zero."""
    seen = Counter((event.moment.micro, event.value) for event in losses if event.value == event.value and event.value)
    return bool(seen) and max(seen.values()) > 1


@family.detector("accumulation-not-divided")
def accumulation_not_divided(record: Record, entry: Entry) -> Iterator[Finding]:
    """Gradients of micro-batches are added up though each is a mean."""
    by_optimizer = record.updates_by_program()
    if len(by_optimizer) >= MANY_OPTIMIZERS:
        raise CannotTell("several optimizers take turns")
    for optimizer, updates in by_optimizer.items():
        times, among = _count_micro_batches(updates)
        if times == 1 or judge_losses(record, times) != "whole":
            continue
        if any(each.kind == "rewrite" and _is_of_gradients(each.name) for each in record.events):
            raise CannotTell("rules change gradients, and may divide them")
        if not is_divided_behind(record, optimizer, updates, times):
            yield _describe_accumulation_not_divided(entry, optimizer, updates, times, among)


def _describe_accumulation_not_divided(
    entry: Entry, optimizer: str, updates: list[Update], times: int, among: int
) -> Finding:
    cut = sum(_is_cut_for_it(each, times) for each in updates)
    severity: Severity = "warning"
    if not is_adaptive(optimizer):
        effect = f"the learning rate is {times} times that of the mean"
    elif cut > CUT * len(updates):
        effect = f"{cut} of {len(updates)} sums are clipped whose mean would not be"
    else:
        severity, effect = "note", f"{optimizer} hardly minds, but clipping and ε do"
    return entry.finding(
        f"Gradients of {times} micro-batches are added up before each update and no loss is divided by {times}: "
        f"{effect}",
        severity=severity,
        site=optimizer,
        span=updates,
        line=updates[0].named("backward")[0].line,
        evidence=[
            ("micro-batches before an update", times, "> 1"),
            ("updates with so many", among, f"≥ {HABIT:.0%} of {len(updates)}"),
        ],
    )


def _is_of_gradients(site: str) -> bool:
    return site.endswith(".grad") or site.startswith("optimizer:")


def _is_cut_for_it(update: Update, times: int) -> bool:
    """Check whether the sum of gradients was clipped to a norm that their mean does not reach."""
    clips = [(call.value, number(call.details.get("max_norm"))) for call in update.named("clip_grad_norm_")]
    return any(most is not None and most < norm <= most * times for norm, most in clips)


def _count_micro_batches(updates: list[Update]) -> tuple[int, int]:
    """Micro-batches of an update, 1 where they differ or come from several lines; and how many updates have so many."""
    counted = Counter(map(_micro_batches, updates[1:] or updates))
    times, among = counted.most_common(1)[0]
    return (times, among) if among >= HABIT * counted.total() else (1, among)


def _micro_batches(update: Update) -> int:
    """Backward passes from one line, each behind forwards from the same lines; 1 for anything else."""
    passes, forwards, seen = [], [], []
    for call in update.before:
        if call.name == "forward" and call.details.get("grad", True):
            forwards.append(call.line)
        elif call.name == "backward":
            passes.append(call)
            seen.append(tuple(forwards))
            forwards = []
    is_loop = len({call.line for call in passes}) == 1 and len(set(seen)) == 1 and bool(seen[0])
    is_plain = not any(call.details.get("retain_graph") or call.details.get("create_graph") for call in passes)
    return len(passes) if is_loop and is_plain else 1
