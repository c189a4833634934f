"""Numbers and names as a card writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from retrograd.core.runs.findings import write_plainly
from retrograd.core.sites.site import ROOT, parse_leniently
from retrograd.explaining.findings.gradients import ParameterGradients
from retrograd.explaining.findings.record import Record
from retrograd.explaining.findings.training import is_number


def show(value: Any) -> str:
    """A number to three digits: ``0.0003``, ``3e-05``, ``1,000``; a tuple of them; anything else as it is."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(show, value))})"
    if not is_number(value):
        return str(value)
    return write_plainly(f"{value:.3g}") if abs(value) < 1e6 else f"{value:.3g}"


def show_change(values: Sequence[float]) -> str:
    """Values that follow each other, without repetitions: ``0.01 → 0.001``."""
    shown = [show(value) for value in values]
    return " → ".join(each for place, each in enumerate(shown) if place == 0 or each != shown[place - 1])


def show_share(count: int, total: int) -> str:
    """``33 %``; never 0 % of some, nor 100 % where some are missing."""
    share = 100 * count / max(total, 1)
    return "under 1 %" if 0 < share < 1 else f"{100 if count == total else min(round(share), 99)} %"


def name_subtrees(names: Iterable[str], every: Sequence[str]) -> list[str]:
    """The largest modules all of whose parameters are among some of a model, and single parameters.

    Args:
        names: the parameters: ``blocks.0.fc:weight``.
        every: those of all models.
    """
    chosen = set(names)
    mixed = {module for name in every if name not in chosen for module in _list_above(name)}
    tops = (next(each for each in _list_above(name) if each not in mixed) for name in every if name in chosen)
    return list(dict.fromkeys(tops))


def _list_above(name: str) -> list[str]:
    """The modules around a parameter, the outermost first, and itself."""
    parts = parse_leniently(name).path.split(".")
    return [*(".".join(parts[: number + 1]) for number in range(len(parts))), name]


def label_of(record: Record, model: str) -> str:
    """What stands in front of what is said of a model; nothing for a single one."""
    return "" if model == ROOT and len(record.models) < 2 else model


def is_idle(record: Record, model: str) -> bool:
    """Check whether a model has no parameter that got a gradient: what is trained comes before it."""
    gradients = record.once(ParameterGradients)
    return not any(gradients.is_trained(name) for name in record.looks if record.model_of(name) == model)
