"""What the models were called with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from retrograd.core.amounts import count_of, list_names
from retrograd.core.groups import gather
from retrograd.core.history.facts import Input
from retrograd.core.sites.site import ROOT, parse_leniently
from retrograd.explaining.card.card import CardEntry
from retrograd.explaining.card.words import is_idle, show
from retrograd.explaining.findings.record import Record

_MOST_PERIOD = 512
"""Batches of the longest cycle that is searched for."""


def describe_inputs(record: Record) -> Iterator[CardEntry]:
    """The arguments of all models, what is trained first: of the first call of each step with grad, and without."""
    calls = Counter(call.about or ROOT for call in record.called("forward") if call.details.get("grad", True))
    blind = []
    for name, looks in sorted(record.inputs.items(), key=lambda each: is_idle(record, record.model_of(each[0]))):
        mine = [look for look in looks if look.rank == looks[0].rank]
        training = [look for look in mine if look.moment.phase == "train"]
        others = [look for look in mine if look.moment.phase != "train"]
        seen, other = _summarise(training or others), _summarise(others) if training and others else None
        of_calls = calls[parse_leniently(name).path] if training else 0
        said = [
            f"{seen['dtype']}{list_names([_show_shape(shape) for shape in seen['shapes']], 2)}, {_tell_values(seen)}",
            _tell_repeats(seen, of_calls),
            f"{count_of(seen['nonfinite'], 'element')} not finite" if seen["nonfinite"] else "",
            f"without grad: {_tell_values(other)}" if other and not _is_alike(seen, other) else "",
        ]
        path, _, key = name.partition(":input.")
        entry = CardEntry(
            topic="input",
            label=key if path == ROOT else f"{path}'s {key}" if key else name,
            text=("" if training else "without grad only: ") + "; ".join(filter(None, said)),
            details=(f"without grad: {_tell_values(other)}; {_tell_repeats(other, 0)}",) if other else (),
            values={"name": name, "with_grad": seen if training else None, "without": other if training else seen},
        )
        if training:
            yield entry
        else:
            blind.append(entry)
    yield from blind


def _summarise(looks: Sequence[Input]) -> dict[str, Any]:
    numbers = np.array([(look.min, look.max, look.value, look.std) for look in looks], float)
    low, high, mean, std = (column[np.isfinite(column)] for column in numbers.T)
    digests = [look.digest for look in looks]
    by_length = gather((len(shape), shape) for shape in sorted({look.shape for look in looks}))
    return {
        "dtype": looks[0].dtype,
        "shapes": [[(min(sizes), max(sizes)) for sizes in zip(*alike, strict=True)] for alike in by_length.values()],
        "looked": len(looks),
        "different": len(set(digests)),
        "period": find_period(digests),
        "min": float(low.min()) if len(low) else None,
        "max": float(high.max()) if len(high) else None,
        "mean": float(np.median(mean)) if len(mean) else None,
        "std": float(np.median(std)) if len(std) else None,
        "nonfinite": sum(look.nonfinite for look in looks),
    }


def find_period(digests: Sequence[str]) -> int:
    """After how many entries a list repeats itself, at least twice as a whole; 0 where it does not."""
    again = next((place for place, each in enumerate(digests) if place and each == digests[0]), 0)
    if not 1 < again <= _MOST_PERIOD or 2 * again > len(digests):
        return 0
    return again if all(digests[place] == digests[place % again] for place in range(len(digests))) else 0


def _show_shape(sizes: Sequence[tuple[int, int]]) -> str:
    """``[32, 3–15, 2]``."""
    return f"[{', '.join(f'{low}' if low == high else f'{low}–{high}' for low, high in sizes)}]"


def _tell_values(seen: Mapping[str, Any]) -> str:
    if seen["min"] is None or seen["max"] is None:
        return "no finite value"
    if seen["min"] == seen["max"]:
        return f"{show(seen['min'])} everywhere"
    spread = (
        ""
        if seen["dtype"].startswith(("int", "uint", "bool"))
        else f", mean {show(seen['mean'])}, std {show(seen['std'])}"
    )
    return f"{show(seen['min'])} to {show(seen['max'])}{spread}"


def _tell_repeats(seen: Mapping[str, Any], calls: int) -> str:
    looked, different = seen["looked"], seen["different"]
    batches = count_of(looked, "batch", "batches")
    if calls > looked:
        batches = f"{looked:,} of {calls:,} batches seen (the first of each step)"
    if looked < 2:
        return batches
    if different in (1, looked):
        return f"{batches}, all {'the same' if different == 1 else 'different'}"
    return f"{batches}, {different:,} different{', always in the same order' if seen['period'] else ''}"


def _is_alike(seen: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Check whether two sets of values are too much alike for a reader to care."""
    if seen["dtype"] != other["dtype"] or None in (seen["std"], other["std"], seen["mean"], other["mean"]):
        return False
    narrow, wide = sorted((seen["std"], other["std"]))
    return bool(abs(seen["mean"] - other["mean"]) <= 0.5 * wide and wide <= 1.5 * narrow)
