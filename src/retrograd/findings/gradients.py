"""Which parameters of a run get gradients, which are to be trained, and which an optimizer holds."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from retrograd.findings.record import Record
from retrograd.sites.site import parse_leniently

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

    @cached_property
    def called(self) -> frozenset[str]:
        """Modules that were called, or in whose calls operations ran."""
        seen = {site.path for site in self._record.sites if site.kind in ("output", "input")}
        return frozenset(seen | {each.module for chain in self._record.chains for each in chain.listed})


def path_of(name: str) -> str:
    """The path of the module of a parameter."""
    return parse_leniently(name).path


def list_names(names: list[str], most: int = 3) -> str:
    """``a, b, c and 4 others``; one more is named rather than counted."""
    if len(names) <= most + 1:
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{', '.join(names[:most])} and {len(names) - most} others"
