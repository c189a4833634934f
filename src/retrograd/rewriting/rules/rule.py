"""Rules, and what they know of the site that they act on: when this is, and what they have put by there."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor

from retrograd.core.errors import RuleError
from retrograd.rewriting.memory.memory import Memory


class SiteState(Memory):
    """A site as one rule sees it: its memory of the site, and the moment of the call at hand.

    All calls of a module share one state; ``call`` tells them apart.

    Attributes:
        site: the printed name of the site, without the number of the call.
        step: updates that optimizers have made so far.
        call: which call of the module within the micro-batch, from 1.
        rank: number of this process in a distributed run; 0 outside of one.
        training: whether the module is in training mode.
        value: for a gradient, the activation (or parameter) that it is the gradient of, detached; None unless the
            rule says ``needs_value``. For a value, None.
        inputs: for an output, or the gradient of an output or input, what went into that very call of the module, by
            the names of its arguments; a tensor in a nest has the keys in its name, ``"states.0"``. For a gradient
            they are detached, for an output they are the tensors themselves, so that gradients flow through what a
            rule makes of them. Empty unless the rule says ``needs_input``.
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
            repair="write the rule as a class of rg.rules.Rule with `needs_input = True`, for a module's output, or "
            "the gradient of its output or input.",
            reason="what goes into a call is held only for rules that say so.",
        )


def next_seed(seed: int, state: SiteState) -> int:
    """A new seed for each draw at each site: from the rule's seed, the site, and how often it has drawn there.

    So a draw does not depend on what other rules or the training draw, and a checkpoint needs one number to go on.
    """
    draws: int = state.get("draws", 0)
    state.put("draws", draws + 1)
    text = f"{seed} {draws} {state.site}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


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
        needs_input: the rule acts on outputs, or on gradients of outputs or inputs, and reads ``state.input`` or
            ``state.inputs``, what went into that very call of the module. For a gradient that is held until its
            backward pass.
        is_elementwise: each element of the result follows from that element alone, from the same element of
            ``state.value`` and of tensors that the rule remembers, and from how often the rule was called. Of a tensor
            that is spread over processes the rule is then shown this process's part, and remembers parts; else the
            whole is put together for it in each process.
    """

    needs_value: ClassVar[bool] = False
    needs_input: ClassVar[bool] = False
    is_elementwise: ClassVar[bool] = False

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
        """The name that events and errors use."""
        return repr(self)

    def state_at(self, site: str) -> SiteState:
        """The state of a site; made when it is first asked for."""
        state = self._states.get(site)
        if state is None:
            state = self._states.setdefault(site, SiteState(site))
        return state

    def state_dict(self) -> dict[str, Any]:
        """The memory of the rule, by site: ``torch.save`` takes it."""
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
    """A function as a rule.

    Attributes:
        change: the function.
    """

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def __call__(self, value: Tensor, state: SiteState) -> Tensor | None:
        return self.change(value, state)

    def __repr__(self) -> str:
        return str(getattr(self.change, "__qualname__", type(self.change).__qualname__))  # without an address


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
