"""Weights that something else than an update has written, or has failed to write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from retrograd.core.amounts import count_of, list_names
from retrograd.core.groups import gather
from retrograd.core.history.facts import Call, OptimizerMade
from retrograd.core.history.weights_facts import Changed, CountedOn, Load, StateRead
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.record import CannotTell, Record
from retrograd.explaining.findings.training import as_list
from retrograd.explaining.findings.updates import by_optimizer

family = Family(__name__)

LEFT_OUT = 0.1
"""Share of a module's keys up to which next to nothing is loaded; our own choice."""

MATCHING = 0.8
"""Share of the keys that match without the prefix, to be meant for this module; our own choice."""

JUMPED = 1.5
"""Ratio of learning rates that is a jump; our own choice."""

OFTEN = 2
"""Times that averaged weights are trained on, to be a habit; our own choice."""

FEWEST_WRITES = 10
"""Writes into a tensor from which on it can be kept up to date at every update; our own choice."""

_NO_LOADS = "no load_state_dict of a module was recorded"


def list_loads(record: Record, of: str = "module") -> list[Load]:
    """What was loaded by modules, optimizers or schedulers of the first process, in its order."""
    return [each for each in record.of(Load) if each.of == of and each.rank == record.first_rank]


def need_loads(record: Record) -> list[Load]:
    """What modules have loaded.

    Raises:
        CannotTell: nothing, or that was not recorded.
    """
    loads = list_loads(record)
    if not loads:
        raise CannotTell(_NO_LOADS)
    return loads


# ---- nothing was loaded ----


@family.detector("keys-not-loaded")
def keys_not_loaded(record: Record, entry: Entry) -> Iterator[Finding]:
    """A state of which next to no key is the module's, though all would be but for a prefix."""
    loads = need_loads(record)
    for place, load in enumerate(loads):
        is_own = _is_own_state(load)
        meant = load.value if is_own else min(load.missing, load.unexpected)  # a new head has no key in the file
        if not load.prefix or load.matching < max(MATCHING * meant, 1) or _is_made_good(loads[place + 1 :], load):
            continue
        if is_own:
            yield _describe_own_state(entry, load)
            return
        if not load.strict and load.value <= LEFT_OUT * (load.value + load.missing):
            yield _describe_unmatched(entry, load)
            return


def _is_own_state(load: Load) -> bool:
    """Check whether a module was given its own tensors."""
    return load.value > 0 and load.same >= load.value and not load.changed and not load.unexpected


def _is_made_good(later: Sequence[Load], load: Load) -> bool:
    """Check whether the same module has loaded most of its keys afterwards, before it was trained."""
    return any(
        (each.name, each.type, each.step) == (load.name, load.type, load.step)
        and not _is_own_state(each)
        and each.value >= 0.5 * (each.value + each.missing)
        for each in later
    )


def _name_prefix(prefix: str) -> str:
    """What to do with the keys, in words."""
    return f"with {prefix[1:]!r} in front" if prefix.startswith("+") else f"without {prefix!r} in front"


def _describe_unmatched(entry: Entry, load: Load) -> Finding:
    keys = int(load.value) + load.unexpected
    loaded = f"{int(load.value)} of the {keys} keys" if load.value else f"none of the {keys} keys"
    return entry.finding(
        f"load_state_dict(strict=False) of {load.type} copies {loaded} that it is given, and {load.missing} keys of "
        f"the module stay as they were: {load.matching} would match {_name_prefix(load.prefix)}",
        site=load.name,
        step=load.step,
        line=load.line,
        evidence=[
            ("keys that were copied", int(load.value), f"≤ {LEFT_OUT:g} of the module's"),
            ("keys that match with the same shape but for the prefix", load.matching, f"≥ {MATCHING:g} of those"),
            ("first key that was not expected", load.unexpected_keys[0] if load.unexpected_keys else ""),
            ("first key that is missing", load.missing_keys[0] if load.missing_keys else ""),
        ],
    )


def _describe_own_state(entry: Entry, load: Load) -> Finding:
    return entry.finding(
        f"load_state_dict of {load.type} is given the module's own tensors, so nothing is loaded: no key of the file "
        f"that was read is the module's, and {load.matching} would match {_name_prefix(load.prefix)}",
        case="own",
        site=load.name,
        step=load.step,
        line=load.line,
        evidence=[
            ("tensors that are copied to themselves", load.same, f"all {int(load.value)}"),
            ("keys of the file that match with the same shape but for the prefix", load.matching),
        ],
    )


# ---- a snapshot that is no copy ----


@family.detector("snapshot-not-copied")
def snapshot_not_copied(record: Record, entry: Entry) -> Iterator[Finding]:
    """A state that was kept to be loaded later is the module's own memory, which training has gone on to change."""
    first = min((update.step for update in record.updates), default=None)
    for load in need_loads(record):
        if load.prefix or not _is_own_state(load) or load.taken < 0 or first is None or load.step <= first:
            continue
        if load.taken < load.step:
            yield _describe_snapshot(entry, load)
        else:
            yield _describe_itself(entry, load)
        return


def _describe_snapshot(entry: Entry, load: Load) -> Finding:
    return entry.finding(
        f"The state of {load.type} that is loaded at step {load.step} is no copy: it is the module's own memory, taken "
        f"by state_dict() at step {load.taken}, so loading it changes nothing and the weights of then are lost",
        site=load.name,
        step=load.taken,
        last_step=load.step,
        line=load.taken_line or load.line,
        evidence=[
            ("tensors that are copied to themselves", load.same, f"all {int(load.value)}"),
            ("steps since state_dict() was called", load.step - load.taken, "> 0"),
            ("loaded at", load.line),
        ],
    )


def _describe_itself(entry: Entry, load: Load) -> Finding:
    return entry.finding(
        f"{load.type} loads its own state at step {load.step}, which changes nothing: the module that is copied from "
        "and the one that is copied to are one and the same",
        case="itself",
        site=load.name,
        step=load.step,
        line=load.line,
        evidence=[
            ("tensors that are copied to themselves", load.same, f"all {int(load.value)}"),
            ("times that this line did so", load.times),
        ],
    )


# ---- averages that are trained on ----


@family.detector("averages-not-put-back")
def averages_not_put_back(record: Record, entry: Entry) -> Iterator[Finding]:
    """Averaged weights are loaded to evaluate with them, and training goes on from these."""
    kept = (load for load in need_loads(record) if load.changed and load.stays and load.evaluated)
    for name, loads in gather((load.name, load) for load in kept if _is_average(load, record)).items():
        if len({load.step for load in loads}) < OFTEN:
            continue
        first = loads[0]
        yield entry.finding(
            f"{first.type} is given averaged weights at step {first.step}, is evaluated with them, and is trained on "
            f"from them, {count_of(len(loads), 'time')}: what was trained before is lost",
            site=name,
            step=first.step,
            last_step=loads[-1].step,
            line=first.line,
            evidence=[
                ("times that the weights were still the loaded ones at the next update", len(loads), f"≥ {OFTEN}"),
                ("writes into the tensors that were loaded", first.written, "as many as updates, about"),
            ],
        )


def _is_average(load: Load, record: Record) -> bool:
    """Check whether what was loaded had been written at most updates, by no optimizer, as an average is."""
    updates = sum(update.step < load.step for update in record.updates)
    return load.file == 0 and load.written >= max(FEWEST_WRITES, 0.5 * updates)


# ---- a resume that is none ----


@family.detector("resume-incomplete")
def resume_incomplete(record: Record, entry: Entry) -> Iterator[Finding]:
    """A program goes on from a file, and loads neither the optimizer nor its learning rate that are in it."""
    reads = [each for each in record.of(StateRead) if each.rank == record.first_rank]
    if not reads:
        raise CannotTell("no file that torch.load reads was recorded")
    for counted in record.of(CountedOn):
        read = next((each for each in reads if each.number == counted.file), None)
        load = _find_restored(record, read) if read is not None else None
        if read is not None and load is not None:
            found = _judge_resumed(record, entry, read, load, counted)
            if found is not None:
                yield found
                return


def _find_restored(record: Record, read: StateRead) -> Load | None:
    """The module that was loaded whole from a file."""
    sizes = {each["tensors"] for each in read.parts if each["kind"] == "weights"}
    for load in list_loads(record):
        is_from_it = load.file == read.number or (not load.file and load.value in sizes)
        if load.step >= read.step and is_from_it and load.value and not load.missing and not load.unexpected:
            return load
    return None


def _judge_resumed(record: Record, entry: Entry, read: StateRead, load: Load, counted: CountedOn) -> Finding | None:
    parts = [each for each in read.parts if each["kind"] == "optimizer"]
    if any(each.step >= read.step for each in list_loads(record, "optimizer")):
        return None
    for part in parts:
        made = _find_same(record, read, part)
        if made is None:
            continue
        then, now = _list_rates(part), _first_rates(record, made)
        has_jumped = any(max(a, b) > JUMPED * min(a, b) for a, b in zip(then, now, strict=False) if a > 0 and b > 0)
        is_lost = part["state"] > 0 and any(key != "step" for key in part["keys"])
        if is_lost or has_jumped:
            return _describe_resumed(entry, read, load, counted, part, made, (then, now) if has_jumped else None)
    return None


def _find_same(record: Record, read: StateRead, part: dict[str, Any] | Any) -> OptimizerMade | None:
    """The optimizer that a part of a file is the state of: with the same settings, and as many parameters."""
    wanted = [_outline(group, group.get("parameters", 0)) for group in part["groups"]]
    for made in record.optimizers.values():
        held = [len(group.get("parameters", ())) + int(group.get("unknown", 0)) for group in made.groups]
        outlines = [_outline(group, count) for group, count in zip(made.groups, held, strict=True)]
        if made.has_updated and made.step >= read.step and outlines == wanted:
            return made
    return None


_NOT_SETTINGS = frozenset({"parameters", "unknown", "params", "initial_lr", "param_names"})


def _outline(group: Any, count: int) -> tuple[int, frozenset[str]]:
    plain = {name for name, value in group.items() if isinstance(value, bool | int | float | str)}
    return count, frozenset(plain - _NOT_SETTINGS)


def _list_rates(part: Any) -> list[float]:
    return [float(group["lr"]) for group in part["groups"] if isinstance(group.get("lr"), int | float)]


def _first_rates(record: Record, made: OptimizerMade) -> list[float]:
    updates = by_optimizer(record.updates).get(made.name, [])
    call: Call | None = updates[0].call if updates else None
    return [float(rate) for rate in as_list(call.details.get("lr"))] if call is not None else []


def _describe_resumed(
    entry: Entry,
    read: StateRead,
    load: Load,
    counted: CountedOn,
    part: Any,
    made: OptimizerMade,
    rates: tuple[list[float], list[float]] | None,
) -> Finding:
    jump = f", and its learning rate goes from {rates[0][0]:.3g} to {rates[1][0]:.3g}" if rates else ""
    keys = [key for key in part["keys"] if key != "step"]
    lost = f"{made.name} begins anew" if part["state"] else f"the learning rate of {made.name} begins anew"
    path = part["path"] or "the whole file"
    return entry.finding(
        f"The program goes on from {read.name or 'a file'}, whose weights are loaded, and not the state of the "
        f"optimizer that is in it ({path}): {lost}{jump}",
        site=made.name,
        step=made.step,
        line=load.line,
        evidence=[
            (f"{counted.name} counts on from {counted.counter} of the file, at", int(counted.value)),
            *([("updates that its state is of", part["step"], "> 0")] if part["step"] > 0 else []),
            *([("state that is lost", list_names(keys, 3))] if part["state"] and keys else []),
            *([("learning rate in the file", rates[0][0]), ("at the first update", rates[1][0])] if rates else []),
            ("optimizers that load a state after the file was read", 0, "0"),
        ],
    )


# ---- values that nothing has written ----


@family.detector("bit-flipped")
def bit_flipped(record: Record, entry: Entry) -> Iterator[Finding]:
    """One bit of a parameter, of a buffer or of the state of an optimizer has changed between two updates."""
    changed = record.of(Changed)
    if not changed:
        raise CannotTell("no value was seen to change between updates, or none was compared")
    flips = [each for each in changed if each.bit >= 0]
    if not flips or len(flips) > OFTEN:
        return
    for flip in flips:
        others = [each for each in changed if each.name == flip.name and each.of == flip.of and each is not flip]
        if others:
            continue
        what = flip.name if flip.of in ("parameter", "buffer") else f"{flip.of} of {flip.name}"
        yield entry.finding(
            f"One bit of {what} has changed between the updates of step {flip.since} and step {flip.step}, and "
            "nothing that is known has written it",
            site=flip.name,
            step=flip.step,
            evidence=[
                ("change of the sum of its bits", f"2 to the power of {flip.bit}", "a power of two"),
                ("tensors that were compared", flip.compared),
            ],
        )
