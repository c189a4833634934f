"""Why the gradient of one tensor is what it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Why = Literal[
    "has one", "not yet", "unknown",
    "frozen", "not a leaf", "never called", "not used", "no_grad", "inference_mode", "cut", "not in the loss",
    "no graph", "not asked for", "returned", "no derivative", "cleared", "failed",
    "zero factor", "dead units", "saturated", "step function", "not picked", "hook", "zero",
    "not optimized", "not in the model", "another copy", "no backward",
]  # fmt: skip
"""In one or two words: ``has one``; ``not yet`` (it will be there after backward); ``unknown``; and what is missing."""

State = Literal["None", "zero", "some"]

FINE: frozenset[str] = frozenset({"has one", "not yet", "frozen"})
"""Nothing is missing: there is one, there will be one, or none is wanted."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the gradient of one tensor is what it is.

    Attributes:
        name: that of the parameter, or the one that was given to the tensor.
        grad: what its ``.grad`` is: ``"None"``, ``"zero"`` (every element) or ``"some"``.
        why: in a word.
        message: one sentence.
        line: ``file:line`` where it went wrong; empty where that is not known, or where nothing is wrong.
        repair: what to do; empty where nothing is wrong.
    """

    name: str
    grad: State
    why: Why
    message: str
    line: str = ""
    repair: str = ""

    @property
    def is_fine(self) -> bool:
        """Whether nothing is missing."""
        return self.why in FINE

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        return f"{self.name}: .grad is {self.grad}: {self.message}{where}"
