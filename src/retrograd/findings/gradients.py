"""Which parameters of a run get gradients, which are to be trained, and which an optimizer holds."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from retrograd.findings.record import Record
from retrograd.sites.site import parse_leniently

_ENOUGH, _NEAR = 32, 0.15
"""Elements of which a root mean square tells something, and how far it may be off: three of its standard errors."""

LOOSE = "optimizer/"
"""How names of tensors begin that an optimizer holds and no model has."""


class Gradients:
    """What a record tells of the gradients of parameters.

    Args:
        record: what it reads.
    """

    def __init__(self, record: Record) -> None:
        self._record = record

    @cached_property
    def steps(self) -> dict[str, tuple[int, int]]:
        """Name of a parameter → in how many steps it had a gradient, and in how many one that was not all zeros."""
        rows = self._record.history.rows
        names = self._record.history.site_names
        sites = [parse_leniently(name) for name in names]
        wanted = np.array([each.kind == "parameter" and each.quantity == "grad" for each in sites], np.bool_)
        chosen = np.flatnonzero(wanted[rows["site"]]) if len(names) else np.zeros(0, np.int64)
        site, step = rows["site"][chosen], rows["step"][chosen]
        some = rows["zeros"][chosen] < rows["count"][chosen]
        return {
            str(sites[code].value): (len(np.unique(step[site == code])), len(np.unique(step[(site == code) & some])))
            for code in np.unique(site)
        }

    def is_trained(self, name: str) -> bool:
        """Whether it had a gradient that was not all zeros."""
        return self.steps.get(name, (0, 0))[1] > 0

    @cached_property
    def held(self) -> frozenset[str]:
        """Parameters that an optimizer holds."""
        made = self._record.optimizers.values()
        return frozenset(
            str(name) for each in made for group in each.groups for name in group.get("parameters", ())
        ) - {""}

    @cached_property
    def frozen(self) -> frozenset[str]:
        """Modules and parameters that require no gradient, as far as that is known."""
        looked = {each.name: each.requires_grad for each in self._record.parameters}
        modules = {
            path for path, each in self._record.modules.items() if each.get("parameters") and not each.get("trainable")
        }
        return frozenset({name for name, requires in looked.items() if not requires} | modules)

    def may_be_frozen(self, name: str) -> bool:
        """Whether it requires no gradient, or nobody can tell."""
        path = path_of(name)
        if name in self.frozen or path in self.frozen:
            return True
        if any(each.name == name for each in self._record.parameters):
            return False
        module = self._record.modules.get(path, {})
        return module.get("parameters") != module.get("trainable")

    def are_fresh(self, names: list[str]) -> bool:
        """Whether most weights among these are as large as torch makes them: 1 / √(3 · fan-in), uniform."""
        looks = {each.name: each for each in reversed(self._record.parameters)}
        weights = [looks[name] for name in names if name in looks and len(looks[name].shape) > 1]
        made = [each for each in weights if _is_as_made(each.shape, each.value)]
        return len(made) > len(weights) / 2

    def may_be_used(self, name: str) -> bool:
        """Whether an operation took a tensor like this parameter, or nobody can tell."""
        looks = {each.name: f"{each.dtype}{list(each.shape)}" for each in self._record.parameters}
        taken = {each for chain in self._record.chains for one in chain.listed for each in one.takes}
        is_seen = any(looks.get(other) in taken for other, (_, some) in self.steps.items() if some)
        return name not in looks or not is_seen or looks[name] in taken

    @cached_property
    def called(self) -> frozenset[str]:
        """Modules that were called, or in whose calls operations ran."""
        seen = {site.path for site in self._record.sites if site.kind in ("output", "input")}
        return frozenset(seen | {each.module for chain in self._record.chains for each in chain.listed})


def _is_as_made(shape: tuple[int, ...], rms: float) -> bool:
    size, fan_in = math.prod(shape), math.prod(shape[1:])
    expected = 1 / math.sqrt(3 * fan_in) if fan_in else 0.0
    return size >= _ENOUGH and abs(rms / expected - 1) < _NEAR if expected else False


def path_of(name: str) -> str:
    """The path of the module of a parameter."""
    return parse_leniently(name).path


def list_names(names: list[str], most: int = 3) -> str:
    """``a, b, c and 4 others``; one more is named rather than counted."""
    if len(names) <= most + 1:
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{', '.join(names[:most])} and {len(names) - most} others"
