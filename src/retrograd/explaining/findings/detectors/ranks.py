"""Ranks that were to hold the same, and do not, or that were to be given different data, and are not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from retrograd.core.amounts import count_of
from retrograd.core.history.facts import Input, Parameter
from retrograd.core.runs.chosen_ranks import tell_chosen
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.record import CannotTell, Record

family = Family(__name__)

ALIKE = 3
"""Steps at which ranks must have been given the same."""

ALL = 0.9
"""Share of the parameters that differ where models do; experts of one's own are fewer."""


@family.detector("ranks-disagree")
def ranks_disagree(record: Record, entry: Entry) -> Iterator[Finding]:
    """Replicas that are no replicas, or that all see the same data."""
    differing = record.history.disagreements
    if differing:
        first = min(differing, key=lambda each: each.step)
        yield entry.finding(
            f"Ranks {first.shown} and {first.other} hold copies of {first.site} that differ from step "
            f"{first.step} on{f', and of {len(differing) - 1} more' if len(differing) > 1 else ''}.",
            site=first.site,
            step=first.step,
            rank=first.other,
            evidence=[("sites that differ", len(differing), "> 0")],
            repair="See what only one rank does: an update without a reduced gradient, or weights that were loaded.",
        )
        return
    if record.processes < 2:
        raise CannotTell("the processes, if there are several, had not found each other by torch.distributed")
    only = tell_chosen(record.manifest)
    if only and len({each.rank for each in record.of(Parameter)}) < 2:
        raise CannotTell(only)
    found = list(_compare_weights(entry, record)) or list(_compare_inputs(entry, record))
    yield from found
    if only and not found:
        raise CannotTell(f"{only}: of other ranks nothing is known")


def _compare_weights(entry: Entry, record: Record) -> Iterator[Finding]:
    """Compare weights of one name that are whole on each rank; nearly all of them must differ at the end."""
    shared = _list_shared(record)
    apart = {name: listed for name, listed in shared.items() if _differ(listed[-1][1])}
    if not shared or len(apart) < ALL * len(shared):
        return
    begin = min(step for listed in apart.values() for step, by_rank in listed if _differ(by_rank))
    name, listed = next(iter(apart.items()))
    ranks = sorted(listed[-1][1])[:2]
    drift = begin > min(listed[0][0] for listed in apart.values())
    yield entry.finding(
        f"Ranks {ranks[0]} and {ranks[1]} train models that differ: in {len(apart)} of "
        f"{count_of(len(shared), 'parameter')}, "
        f"from step {begin} on{', though they began alike: gradients are not averaged' if drift else ''}.",
        case="weights",
        severity="critical" if drift else "warning",
        site=name,
        step=begin,
        last_step=listed[-1][0],
        rank=ranks[1],
        line=record.line_of(name),
        evidence=[("parameters that differ", len(apart) / len(shared), f"≥ {ALL:g} of those on both ranks")],
    )


def _list_shared(record: Record) -> dict[str, list[tuple[int, dict[int, Parameter]]]]:
    """List the looks at each parameter that several ranks hold whole: steps, each with a look of each rank."""
    looks: dict[str, dict[int, dict[int, Parameter]]] = {}
    for look in record.parameters:
        if look.requires_grad and look.grad in ("some", ""):
            looks.setdefault(look.name, {}).setdefault(look.step, {})[look.rank] = look
    shared = {
        name: [(step, by_rank) for step, by_rank in sorted(by_step.items()) if len(by_rank) > 1]
        for name, by_step in looks.items()
    }
    return {name: listed for name, listed in shared.items() if len(listed) > 1 and _is_whole(record, name)}


def _is_whole(record: Record, name: str) -> bool:
    """Check whether what was recorded of its gradient has as many elements as it."""
    shape = next(look.shape for look in record.parameters if look.name == name)
    site = f"{name}.grad"
    return site in record.history and bool((record.series(site).rows["count"] == math.prod(shape)).all())


def _compare_inputs(entry: Entry, record: Record) -> Iterator[Finding]:
    ranks = sorted({each.rank for each in record.of(Input)})
    if len(ranks) < 2:
        raise CannotTell("inputs of a single rank were recorded")
    digests: dict[int, dict[tuple[int, int, str], str]] = {rank: {} for rank in ranks}
    for each in record.of(Input):
        digests[each.rank][each.step, each.moment.micro, each.name] = each.digest
    ranks = [rank for rank in ranks if rank == ranks[0] or not {rank, ranks[0]} <= record.together]
    if len(ranks) < 2:
        raise CannotTell("the ranks share each forward of one model, and its batch")
    first, second = (digests[rank] for rank in ranks[:2])
    shared = [key for key in first if key in second]
    steps = {key[0] for key in shared}
    varies = len({first[key] for key in shared}) > len({key[2] for key in shared})
    if len(steps) >= ALIKE and varies and all(first[key] == second[key] for key in shared):
        yield entry.finding(
            f"Ranks {ranks[0]} and {ranks[1]} have been given the same batches at all of {len(steps)} steps: the "
            "work of one is wasted.",
            case="inputs",
            step=min(steps),
            last_step=max(steps),
            rank=ranks[1],
            evidence=[("steps with the same inputs", len(steps), f"≥ {ALIKE}, all of them")],
        )


def _differ(by_rank: Mapping[int, Parameter]) -> bool:
    return (
        len({(look.digest, look.shape) for look in by_rank.values()}) > 1
        and len({look.shape for look in by_rank.values()}) == 1
    )
