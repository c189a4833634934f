"""What a rule knows of the site that it acts on: when this is, and what it has put by there."""

from __future__ import annotations

from torch import Tensor

from retrograd.memory.memory import Memory


class SiteState(Memory):
    """One site as one rule sees it: its memory of the site, and the moment of the call at hand.

    All calls of a module share one state; ``call`` tells them apart.

    Attributes:
        site: the printed name of the site, without the number of the call.
        step: updates that optimizers have made so far.
        call: which call of the module within the micro-batch, from 1.
        rank: number of this process in a distributed run; 0 outside of one.
        training: whether the module is in training mode.
        value: for a gradient, the activation (or parameter) that it is the gradient of, detached; None unless the
            rule says ``needs_value``. For a value, None.
    """

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site
        self.step = 0
        self.call = 1
        self.rank = 0
        self.training = True
        self.value: Tensor | None = None
