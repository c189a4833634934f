"""Which parameters of each model were trained, and which were not, and why."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from retrograd.core.amounts import count_of, list_names
from retrograd.core.history.facts import Parameter
from retrograd.core.history.ungraded import list_ungraded
from retrograd.core.sites.site import ROOT
from retrograd.explaining.card.card import CardEntry
from retrograd.explaining.card.words import name_subtrees, show_share
from retrograd.explaining.findings.chain import count
from retrograd.explaining.findings.gradients import ParameterGradients
from retrograd.explaining.findings.record import Record

STATES = {
    "trained": "trained",
    "frozen": "frozen",
    "moved": "changed without a gradient",
    "no_gradient": "never got a gradient",
    "zero_gradient": "got zero gradients only",
    "unchanged": "got gradients and never changed",
    "no_optimizer": "in no optimizer",
    "replaced": "in no optimizer since they have replaced others",
}
"""What becomes of a parameter, and how it is said. Those that are *moved* are written by hand, as averages are."""


def describe_parameters(record: Record) -> Iterator[CardEntry]:
    """The parameters that each model had in the end, that which was trained first; a tied one counts once."""
    if not record.looks and record.modules:
        counts = [(each.get("parameters") or 0, each.get("trainable") or 0) for each in record.modules.values()]
        total, trainable = (sum(column) for column in zip(*counts, strict=True))
        text = f"{total:,}, {trainable:,} of them require a gradient; what became of them was not recorded"
        yield CardEntry(topic="parameters", text=text, values={"count": total})
    gradients, never = record.once(ParameterGradients), set(list_ungraded(record.history))
    states = {name: _find_state(record, name, record.looks[name], gradients, never) for name in record.last_looks}
    of_model: dict[str, list[str]] = {}
    for name in states:
        of_model.setdefault(record.model_of(name), []).append(name)
    found = [_describe(record, model, names, states) for model, names in of_model.items()]
    yield from sorted(found, key=lambda each: ("trained" not in each.values, -each.values["count"]))


def _describe(record: Record, model: str, names: list[str], states: dict[str, str]) -> CardEntry:
    every, kind = list(states), record.type_of(model)
    shares = {
        state: _add_up(record, some, every)
        for state in STATES
        if (some := [name for name in names if states[name] == state])
    }
    total = sum(share["count"] for share in shares.values())
    said = [
        f"{share['count']:,} {STATES[state]} ({show_share(share['count'], total)}: {list_names(share['of'], 3)})"
        for state, share in shares.items()
    ]
    if len(shares) == 1:
        said = [f"all {count_of(total, 'parameter')} {STATES[next(iter(shares))]}"]
    tied = [(look.name, *look.tied) for name in names if (look := record.last_looks[name]).tied]
    return CardEntry(
        topic="parameters",
        label=kind if model == ROOT or not kind else f"{model} ({kind})",
        text="; ".join(said),
        line=record.line_of(model),
        details=(
            *(
                f"{STATES[state]}: {list_names(each['of'], 40)}"
                for state, each in shares.items()
                if len(each["of"]) > 4
            ),
            *(f"one tensor: {list_names(each, 10)}" for each in tied),
        ),
        values={"model": model, "type": kind, "count": total, **shares, "tied": tied},
    )


def _add_up(record: Record, names: list[str], every: list[str]) -> dict[str, Any]:
    total = sum(count(record.last_looks[name].shape) for name in names)
    return {"count": total, "tensors": len(names), "of": name_subtrees(names, every)}


def _find_state(
    record: Record, name: str, looks: list[Parameter], gradients: ParameterGradients, never: set[str]
) -> str:
    if name in gradients.held and (since := _find_replaced(looks)):
        if not since[-1].requires_grad or {look.grad for look in since} == {"None"}:
            return "no_gradient" if since[-1].requires_grad else "frozen"
        return "replaced"
    digests, seen = [look.digest for look in looks if look.digest], {look.grad for look in looks}
    changed = len(set(digests)) > 1
    if not any(look.requires_grad for look in looks):
        return "moved" if changed else "frozen"
    if gradients.is_trained(name) or "some" in seen or gradients.has_hidden_one(name):
        if len(digests) > 1 and not changed and name in gradients.held:
            return "unchanged"
        return "trained" if changed or name in gradients.held or not record.optimizers else "no_optimizer"
    if changed:
        return "moved"
    return "zero_gradient" if name in gradients.steps or "zero" in seen else "no_gradient"


def _find_replaced(looks: list[Parameter]) -> list[Parameter]:
    """The samples of a parameter since no optimizer holds it which held the one that was there before."""
    mine = [look for look in looks if look.rank == looks[0].rank]
    since = list(takewhile(lambda look: look.held is False, reversed(mine)))[::-1]
    is_known = len(since) > 1 or (
        bool(since) and not since[-1].grad
    )  # in the end; before that another may be to update
    return since if is_known and len({look.digest for look in since if look.digest}) < 2 else []
