"""One line of a check: one call of a module, with respect to one of its arguments or parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from retrograd.sites.site import Site


class Verdict(Enum):
    """What was found.

    Attributes:
        WRONG: the backward is not an adjoint of the forward.
        NOT_FINITE: what the forward returns is not finite, or its derivative is infinite.
        RANDOM: what the forward returns is drawn at random, and not a function of what is asked for.
        NO_GRAPH: what the forward returns has no graph, so that no gradient arrives.
        REWRITTEN: it is one, and a hook or a rule changes what it gives, as it is meant to.
        NOT_CHECKED: it could not be compared; the reason says why.
        KINK: the forward has no derivative where the batch lies; close by, the backward is its adjoint.
        OK: it is its adjoint.
    """

    WRONG = "wrong"
    NOT_FINITE = "not finite"
    RANDOM = "random"
    NO_GRAPH = "no graph"
    REWRITTEN = "rewritten"
    NOT_CHECKED = "not checked"
    KINK = "kink"
    OK = "ok"


ORDER = tuple(Verdict)
"""Verdicts, the worst first."""
FAILURES = frozenset({Verdict.WRONG, Verdict.NOT_FINITE, Verdict.RANDOM, Verdict.NO_GRAPH})
"""With one of them a model is not to be trained as it is."""


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        site: the call and the argument or parameter that the derivative is taken with respect to: ``fc:input.x``,
            ``cell#2:weight``.
        caller: the path of the module that was called, and which of its calls it was.
        kind: the type of that module.
        within: the calls that this one is made in, the outermost first.
        forward: ⟨J v, u⟩; NaN where it is not known.
        backward: ⟨v, Jᵀ u⟩; NaN where it is not known.
        difference: their difference, relative to the largest of both and of the norm of Jᵀ u.
        tolerance: how large that may be.
        method: how ``forward`` was found: "forward mode" or "finite differences".
        precision: the dtype that was computed in.
        verdict: what was found.
        reason: what the mismatch looks like, or why nothing was compared.
    """

    site: Site
    caller: tuple[str, int]
    kind: str
    verdict: Verdict
    within: tuple[tuple[str, int], ...] = ()
    reason: str = ""
    forward: float = math.nan
    backward: float = math.nan
    difference: float = math.nan
    tolerance: float = math.nan
    method: str = ""
    precision: str = ""

    @property
    def caller_name(self) -> str:
        """The call, as in ``blocks.0.fc`` or ``cell#2``."""
        return name_call(self.caller)


def name_call(caller: tuple[str, int]) -> str:
    """A call, as in ``blocks.0.fc`` or ``cell#2``."""
    path, call = caller
    return path if call == 1 else f"{path}#{call}"


def rank(row: Row) -> tuple[int, float]:
    """Sorts rows, the worst first."""
    excess = row.difference / row.tolerance if row.tolerance else 0.0
    return ORDER.index(row.verdict), -excess if math.isfinite(excess) else 0.0
