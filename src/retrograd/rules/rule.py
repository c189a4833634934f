"""The contract of a rule: a function of a tensor and of its site's state, with one memory a site."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor

from retrograd.errors import RuleError
from retrograd.rules.site_state import SiteState

Change = Callable[[Tensor, SiteState], Tensor | None]
"""What a rule is, at its least: ``(value, state) -> tensor``, or None to leave the value as it is."""


class Rule:
    """Changes the values or the gradients of sites. Subclasses write ``__call__``.

    A rule returns a new tensor of the same shape, dtype and device, or None to leave the value alone; it never
    writes into its argument. It should never wait for a device (``.item()``, ``if tensor:``). What it wants to
    remember of a site it puts into ``state``, from where it comes into checkpoints.

    Attributes:
        needs_value: the rule acts on gradients and reads ``state.value``, the activation that belongs to this very
            gradient. That activation is then held until its backward pass.
        needs_input: the rule acts on gradients of outputs or inputs and reads ``state.input`` or ``state.inputs``, what
            went into that very call of the module. That is then held until its backward pass.
    """

    needs_value: ClassVar[bool] = False
    needs_input: ClassVar[bool] = False

    _states: dict[str, SiteState]

    def __new__(cls, *_args: Any, **_options: Any) -> Self:
        rule = super().__new__(cls)
        rule._states = {}  # here, so that an __init__ which forgets to call ours does no harm
        return rule

    def __call__(self, value: Tensor, state: SiteState) -> Tensor | None:
        """Return what takes the place of ``value``; None for no change.

        Args:
            value: an activation, a parameter or a gradient. Under loss scaling gradients come unscaled.
            state: the state of its site.
        """
        raise NotImplementedError

    @property
    def name(self) -> str:
        """What events and errors call it."""
        return repr(self)

    def state_at(self, site: str) -> SiteState:
        """The state of a site; made when it is first asked for."""
        state = self._states.get(site)
        if state is None:
            state = self._states.setdefault(site, SiteState(site))
        return state

    def state_dict(self) -> dict[str, Any]:
        """What the rule remembers, by site: ``torch.save`` takes it."""
        return {site: state.state_dict() for site, state in self._states.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict()`` gave."""
        for site in {**self._states, **saved}:  # into the states that there are, for whoever acts holds them
            self.state_at(site).load_state_dict(saved.get(site, {}))

    def without_memory(self) -> Self:
        """The same rule as if it had never been used; it shares what it was made with, such as tensors."""
        copied = copy.copy(self)
        copied._states = {}
        return copied

    def __repr__(self) -> str:
        given = ", ".join(f"{key}={_brief(value)}" for key, value in vars(self).items() if not key.startswith("_"))
        return f"{type(self).__name__}({given})"


def _brief(value: object) -> str:
    """A value in few letters: a tensor by its shape, a list by its length, a function by its name."""
    if isinstance(value, Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {len(value)}"
    name = getattr(value, "__qualname__", None)
    return repr(value) if name is None else str(name)


class PlainRule(Rule):
    """A function as a rule."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self._change = change

    def __call__(self, value: Tensor, state: SiteState) -> Tensor | None:
        return self._change(value, state)

    def __repr__(self) -> str:
        return str(getattr(self._change, "__qualname__", type(self._change).__qualname__))  # without an address


def as_rule(given: Rule | Change) -> Rule:
    """A rule as it is, and a function as a rule.

    Raises:
        RuleError: for anything else.
    """
    if isinstance(given, Rule):
        return given
    if isinstance(given, type) or not callable(given):
        raise RuleError(
            f"{given!r} is not a rule.",
            repair="give a function (value, state) -> tensor, or an instance such as rg.rules.ClipNorm(1.0).",
        )
    return PlainRule(given)
