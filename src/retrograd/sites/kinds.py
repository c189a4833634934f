"""Patterns for all sites of one kind: ``*:parameters.grad``, ``blocks.*:outputs``, ``fc#2:inputs.grad``.

    PATH[#CALL]:outputs[.grad]                 every tensor that these modules return
    PATH[#CALL]:inputs[.grad]                  every tensor that they are called with
    PATH:parameters[.grad|.update]             every parameter of their own

What only a name of its own stands for, a rank's own gradient (``fc:weight.local.grad``) and what rules have changed
(``fc:weight.before.grad``), is not among the parameters. No site is called like this: a parameter by the name of
``outputs`` has the site ``fc:parameter.outputs``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from retrograd.errors import PatternError
from retrograd.sites.glob import check_call, translate_glob
from retrograd.sites.site import BEFORE, LOCAL, WATCH, Kind, Quantity, Site

_QUANTITIES: dict[str, tuple[str, ...]] = {
    "outputs": ("grad",),
    "inputs": ("grad",),
    "parameters": ("grad", "update"),
}
_KINDS: dict[str, Kind] = {"outputs": "output", "inputs": "input", "parameters": "parameter"}
_FORM = re.compile(
    r'(?P<path>"(?:[^"\\]|\\.)*"|[^:#]+)(?:#(?P<call>[^:]*))?:(?P<kind>outputs|inputs|parameters)(?:\.(?P<rest>.*))?'
)


@dataclass(frozen=True, slots=True)
class KindPattern:
    """All sites of one kind.

    Attributes:
        path: a glob over the paths of modules.
        call: a glob over the numbers of calls; None for every call.
        kind: of which kind.
        quantity: values, gradients or updates.
    """

    path: str
    call: str | None
    kind: Kind
    quantity: Quantity

    def matches(self, site: Site) -> bool:
        """Whether a site is meant."""
        return (
            site.kind == self.kind
            and site.quantity == self.quantity
            and not (site.kind == "parameter" and site.keys[1:] and site.keys[-1] in (BEFORE, LOCAL))
            and bool(translate_glob(self.path)(site.printed_path))
            and (self.call is None or bool(translate_glob(self.call)(str(site.call))))
        )

    def may_match_later(self, site: Site) -> bool:
        """Whether it may match another call of what has this site."""
        return self.call is not None and site.kind == self.kind and bool(translate_glob(self.path)(site.printed_path))


def parse_kinds(pattern: str) -> KindPattern | None:
    """Read a pattern for a kind; None for a pattern of another form.

    Raises:
        PatternError: if it asks for what no site of this kind has.
    """
    form = None if pattern.startswith(WATCH) else _FORM.fullmatch(pattern)
    if form is None:
        return None
    kind, rest, call = form["kind"], form["rest"], form["call"]
    if rest is not None and rest not in _QUANTITIES[kind]:
        forms = " or ".join(f"'{form['path']}:{kind}{tail}'" for tail in ("", *(f".{q}" for q in _QUANTITIES[kind])))
        raise PatternError(f"{pattern!r} asks for {rest!r} of {kind}.", repair=f"write {forms}.")
    if call is not None:
        check_call(pattern, call)
        if kind == "parameters" and rest is not None:
            raise PatternError(
                f"{pattern!r} asks for one call of a {rest}.",
                repair=f"write '{form['path']}:{kind}.{rest}'.",
                reason="a parameter has one for all calls of its module.",
            )
    quantity: Quantity = "grad" if rest == "grad" else "update" if rest == "update" else "value"
    return KindPattern(form["path"], call, _KINDS[kind], quantity)
