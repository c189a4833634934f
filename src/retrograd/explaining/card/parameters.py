"""Which parameters of each model were trained, and which not, and why; what states were loaded, and what changed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from retrograd.core.amounts import count_of, list_names
from retrograd.core.groups import gather
from retrograd.core.history.facts import Parameter
from retrograd.core.history.ungraded import list_ungraded
from retrograd.core.history.weights_facts import Changed, Load, StateRead
from retrograd.core.runs.findings import shorten_line
from retrograd.core.sites.site import ROOT
from retrograd.explaining.card.card import CardEntry
from retrograd.explaining.card.words import name_subtrees, show_change, show_share
from retrograd.explaining.findings.chain import count
from retrograd.explaining.findings.coverage import Coverage
from retrograd.explaining.findings.gradients import ParameterGradients
from retrograd.explaining.findings.record import Record

STATES = {
    "trained": "trained",
    "frozen": "frozen",
    "moved": "changed without a gradient",
    "unseen": "changed with no gradient at a recorded step",
    "no_gradient": "never got a gradient",
    "zero_gradient": "got zero gradients only",
    "unchanged": "got gradients and never changed",
    "no_optimizer": "in no optimizer",
    "replaced": "in no optimizer since they have replaced others",
}
"""What becomes of a parameter, and how it is said. Those that are *moved* are written by hand, as averages are."""

_IN_PART = {
    "no_gradient": "had no gradient at a recorded step",
    "zero_gradient": "had zero gradients only at recorded steps",
}
"""The same where not every step was recorded."""


def describe_parameters(record: Record) -> Iterator[CardEntry]:
    """The parameters that each model had in the end, that which was trained first; a tied one counts once."""
    if not record.looks and record.modules:
        counts = [(each.get("parameters") or 0, each.get("trainable") or 0) for each in record.modules.values()]
        total, trainable = (sum(column) for column in zip(*counts, strict=True))
        text = f"{total:,}, {trainable:,} of them require a gradient; what became of them was not recorded"
        yield CardEntry(topic="parameters", text=text, values={"count": total})
    gradients, never = record.once(ParameterGradients), set(list_ungraded(record.history))
    states = {name: _find_state(record, name, record.looks[name], gradients, never) for name in record.last_looks}
    of_model = gather((record.model_of(name), name) for name in states)
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
    told = STATES if record.once(Coverage).is_whole else STATES | _IN_PART
    said = [
        f"{share['count']:,} {told[state]} ({show_share(share['count'], total)}: {list_names(share['of'], 3)})"
        for state, share in shares.items()
    ]
    if len(shares) == 1:
        said = [f"all {count_of(total, 'parameter')} {told[next(iter(shares))]}"]
    tied = [(look.name, *look.tied) for name in names if (look := record.last_looks[name]).tied]
    return CardEntry(
        topic="parameters",
        label=kind if model == ROOT or not kind else f"{model} ({kind})",
        text="; ".join(said),
        line=record.line_of(model),
        details=(
            *(f"{told[state]}: {list_names(each['of'], 40)}" for state, each in shares.items() if len(each["of"]) > 4),
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
        return "moved" if record.once(Coverage).is_whole else "unseen"
    return "zero_gradient" if name in gradients.steps or "zero" in seen else "no_gradient"


def _find_replaced(looks: list[Parameter]) -> list[Parameter]:
    """The samples of a parameter since no optimizer holds it which held the one that was there before."""
    mine = [look for look in looks if look.rank == looks[0].rank]
    since = list(takewhile(lambda look: look.held is False, reversed(mine)))[::-1]
    is_known = len(since) > 1 or (
        bool(since) and not since[-1].grad
    )  # in the end; before that another may be to update
    return since if is_known and len({look.digest for look in since if look.digest}) < 2 else []


# ---- states that were loaded, and what else has changed between updates ----


def describe_loads(record: Record) -> Iterator[CardEntry]:
    """What ``load_state_dict`` has taken, by module or optimizer and line; the last of several."""
    files = {read.number: read for read in record.of(StateRead)}
    latest = {(load.of, load.name, load.line): load for load in record.of(Load) if load.rank == record.first_rank}
    taken = {number: {load.of for load in latest.values() if load.file == number} for number in files}
    for load in latest.values():
        read = files.get(load.file)
        left = [kind for kind in _list_kinds(read) if kind not in taken[load.file]]
        said = [_TELL[load.of](load), _tell_source(load, read)]
        said += [f"whose {' and '.join(left)} {'were' if len(left) > 1 else 'was'} not loaded"] if left else []
        said += [f"{load.times:,} times"] if load.times > 1 else []
        said += ["put back before the next update"] if load.stays is False and load.changed else []
        yield CardEntry(
            topic="loaded",
            label=load.type if load.name in (ROOT, "") else load.name,
            text=", ".join(filter(None, said)),
            line=load.line,
            details=_list_keys(load),
            values={
                "of": load.of, "name": load.name, "keys": load.value, "missing": load.missing, "strict": load.strict,
                "unexpected": load.unexpected, "changed": load.changed, "file": read.name if read else "",
                "times": load.times,
            },
        )  # fmt: skip


def describe_changes(record: Record) -> Iterator[CardEntry]:
    """What was not, when an update began, what the update before had left: by hand, in a forward, or by nobody."""
    for of, listed in gather((each.of, each) for each in record.of(Changed)).items():
        names = list(dict.fromkeys(name for each in listed for name in each.sites))
        times = max(listed[-1].times, len(listed))
        what = "state of an optimizer" if of not in ("parameter", "buffer") else of
        often = f"{'at least ' if times > len(listed) or times >= 20 else ''}{count_of(times, 'time')}"
        yield CardEntry(
            topic="changed",
            text=f"{list_names(names, 2)} ({what}) changed between updates, {often} from step {listed[0].step:,} on",
            values={"of": of, "sites": names, "times": times, "first": listed[0].step},
        )


def _tell_module(load: Load) -> str:
    copied = int(load.value)
    said = [
        f"{copied:,} of {count_of(copied + load.missing, 'key')}" if load.missing else f"all {count_of(copied, 'key')}"
    ]
    said += [f"{load.unexpected:,} unexpected"] if load.unexpected else []
    said += ["strict=False"] if not load.strict else []
    said += ["from its own tensors"] if load.same and load.same == copied else []
    said += ["which changed nothing"] if load.changed is False else []
    return ", ".join(said)


def _tell_optimizer(load: Load) -> str:
    said = [f"the state of {count_of(int(load.value), 'parameter')}"]
    said += [f"at its step {load.count:,}"] if load.count >= 0 else []
    return ", ".join([*said, f"lr {show_change(load.lr)}"] if load.lr else said)


def _tell_scheduler(load: Load) -> str:
    return f"at epoch {load.count:,}" if load.count >= 0 else "its state"


_TELL = {"module": _tell_module, "optimizer": _tell_optimizer, "scheduler": _tell_scheduler}


def _tell_source(load: Load, read: StateRead | None) -> str:
    if read is not None:
        return f"from {read.name or 'an open file'}"
    if load.taken < 0:
        return ""
    return f"as taken at step {load.taken:,}{f' ({shorten_line(load.taken_line)})' if load.taken_line else ''}"


def _list_kinds(read: StateRead | None) -> list[str]:
    """Which other states a file holds: of an optimizer, of a scheduler."""
    kinds = dict.fromkeys(str(part.get("kind")) for part in read.parts) if read else {}
    return [kind for kind in kinds if kind in ("optimizer", "scheduler")]


def _list_keys(load: Load) -> tuple[str, ...]:
    named = (("missing", load.missing_keys, load.missing), ("unexpected", load.unexpected_keys, load.unexpected))
    return tuple(f"{what}: {', '.join(keys)}{', …' if n > len(keys) else ''}" for what, keys, n in named if keys)
