"""What states were loaded, from where, and how much of them; and what else has changed between updates."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.core.amounts import count_of, list_names
from retrograd.core.history.weights_facts import Changed, Load, StateRead
from retrograd.core.runs.findings import shorten_line
from retrograd.core.sites.site import ROOT
from retrograd.explaining.card.card import CardEntry
from retrograd.explaining.card.words import show_change
from retrograd.explaining.findings.record import Record


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
    found: dict[str, list[Changed]] = {}
    for each in record.of(Changed):
        found.setdefault(each.of, []).append(each)
    for of, listed in found.items():
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
