"""What a rule knows of the site that it acts on: when this is, and what it has put by there."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from retrograd.errors import RuleError
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
        inputs: for the gradient of an output or input, what went into that very call of the module, by the names of
            its arguments, detached; a tensor in a nest has the keys in its name, ``"states.0"``. Empty unless the rule
            says ``needs_input``.
    """

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site
        self.step = 0
        self.call = 1
        self.rank = 0
        self.training = True
        self.value: Tensor | None = None
        self.inputs: Mapping[str, Tensor] = {}

    @property
    def input(self) -> Tensor:
        """The only one of :attr:`inputs`.

        Raises:
            RuleError: if there are several, or none.
        """
        if len(self.inputs) == 1:
            return next(iter(self.inputs.values()))
        if self.inputs:
            names = ", ".join(f"state.inputs[{name!r}]" for name in self.inputs)
            raise RuleError(f"{self.site} belongs to {len(self.inputs)} inputs.", repair=f"take one of {names}.")
        raise RuleError(
            f"There is no input beside what comes to {self.site}.",
            repair="write the rule as a class of rg.rules.Rule with `needs_input = True`, for the gradient of a "
            "module's output or input.",
            reason="what goes into a call is held until its backward pass only for rules that say so.",
        )
