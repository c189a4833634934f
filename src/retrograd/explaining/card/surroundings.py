"""Precision, processes, and what a record lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from retrograd.core.amounts import count_of, list_names
from retrograd.core.history.facts import Input, Parameter
from retrograd.core.history.sink import NEVER_CALLED
from retrograd.core.recording.schedule import describe_schedule
from retrograd.explaining.card.card import CardEntry
from retrograd.explaining.card.words import show_change
from retrograd.explaining.findings.chain import count, shape_of
from retrograd.explaining.findings.coverage import Coverage
from retrograd.explaining.findings.record import Record

_SAID = ("the parameter is", "no gradient came", "no optimizer")
"""How reasons begin that are of the program, and not of the record."""

_COMPARED = {"same": "the same", "different": "different", "some": "partly the same"}


def describe_precision(record: Record) -> Iterator[CardEntry]:
    """Types of parameters, and of what the operations of the forward made; half beside float32 is as autocast does."""
    held, calls = Counter[str](), record.called("scaler.update")
    for look in record.last_looks.values():
        held[look.dtype] += count(look.shape)
    made = Counter(
        tensor.partition("[")[0]
        for chain in record.chains[:1]
        for operation in chain.listed
        for tensor in operation.makes[:1]
        if operation.module and operation.node and shape_of(tensor) is not None
    )
    scales = [calls[0].value, calls[-1].value] if calls else []
    if held or made:
        names, total = list_names([name for name, _ in held.most_common()]), sum(made.values())
        listed = list_names([f"{name} by {n:,} of {count_of(total, 'operation')}" for name, n in made.most_common()])
        text = f"{names} throughout" if list(held) == list(made) else f"{names} parameters"
        text += f"; the forward makes {listed}" if made and list(held) != list(made) else ""
        text += f"; loss scale {show_change(scales)}" if scales else ""
        values = {"parameters": dict(held.most_common()), "operations": dict(made.most_common()), "scales": scales}
        yield CardEntry(topic="precision", text=text, line=calls[0].line if calls else "", values=values)


def describe_ranks(record: Record) -> Iterator[CardEntry]:
    """How many processes there were, and whether they hold the same parameters and are given the same batches."""
    ranks = {fact.rank for fact in record.facts}
    total = max(record.processes, len(ranks))
    if total > 1:
        alike = {"parameters": _compare(record.of(Parameter)), "inputs": _compare(record.of(Input))}
        said = [count_of(total, "process", "processes")]
        said += [f"{len(ranks):,} of them recorded"] if len(ranks) < total else []
        said += [f"{_COMPARED[alike['parameters']]} parameters on all"] if alike["parameters"] else []
        said += [f"{_COMPARED[alike['inputs']]} batches"] if alike["inputs"] else []
        yield CardEntry(
            topic="ranks", text=", ".join(said), values={"processes": total, "recorded": len(ranks), **alike}
        )


def _compare(looks: list[Parameter] | list[Input]) -> str:
    """Whether what ranks hold at a step is the same on all: ``same``, ``different``, ``some``; empty: not known."""
    found: dict[tuple[int, str], dict[int, str]] = {}
    for look in looks:
        if look.digest:
            found.setdefault((look.step, look.name), {}).setdefault(look.rank, look.digest)
    alike = {len(set(each.values())) == 1 for each in found.values() if len(each) > 1}
    return "" if not alike else "some" if len(alike) > 1 else "same" if True in alike else "different"


def describe_omissions(record: Record) -> Iterator[CardEntry]:
    """What the record lacks: steps, sites, operations, files."""
    manifest, sites, coverage = record.manifest, dict[str, list[str]](), record.once(Coverage)
    for each in manifest.get("not_recorded") or ():
        if isinstance(each, Mapping) and not str(each.get("reason")).startswith(_SAID):
            reason = str(each.get("reason"))
            if reason == NEVER_CALLED and not coverage.is_whole:
                reason = f"the module was called at none of {coverage.tell()}"
            sites.setdefault(reason, []).append(str(each.get("site")))
    schedule, selection = describe_schedule(manifest), manifest.get("selection") or []
    chosen = [selection] if isinstance(selection, str) else list(map(str, selection))
    cut, missing = [each.step for each in record.operations if each.is_cut], record.missing()
    said = [
        f"recorded {schedule}" if schedule not in ("", "every step") else "",
        f"sites {list_names(chosen)} alone" if chosen not in ([], ["(default)"]) else "",
        f"without {missing}" if missing else "",
        f"operations of step {cut[0]:,} in part, for there were too many" if cut else "",
        *(f"{list_names(names, 1)}: {reason.partition(': ')[0]}" for reason, names in sites.items()),
    ]
    if any(said):
        yield CardEntry(
            topic="left out",
            text="; ".join(list(filter(None, said))[:3]),
            details=tuple(f"{reason}: {list_names(names, 20)}" for reason, names in sites.items()),
            values={"schedule": schedule, "selection": chosen, "missing": missing, "cut": cut, "sites": sites},
        )
