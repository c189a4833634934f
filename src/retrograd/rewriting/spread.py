"""How a rule acts on a tensor that is spread over processes: together they get what one process alone would.

A rule of single elements acts on this process's part, and a rule of the norm too, once the processes have put their
norms together. For any other rule the whole is put together in each process, and each keeps its part of the result.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from retrograd.core.hooks.engine import grad_enabled
from retrograd.core.norms import norm, summing_type
from retrograd.core.ranks.placements import (
    add_over_parts,
    is_sharded,
    is_summand,
    local_part,
    spread_part,
    spread_whole,
    whole_of,
)
from retrograd.rewriting.rules.norm_rule import NormRule
from retrograd.rewriting.rules.rule import Rule, SiteState


def show(rule: Rule, value: Tensor, state: SiteState) -> Tensor:
    """What a rule is shown of a tensor: the part that this process holds, or the whole; its state shows the same."""
    reads = _part_of if _acts_on_part(rule, value) else _whole_of
    if state.value is not None:
        state.value = reads(state.value)
    return reads(value)


def whole_inputs(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The inputs of a call as rules are shown them: always whole."""
    return {name: _whole_of(each) for name, each in inputs.items()}


def act(rule: Rule, value: Tensor, shown: Tensor, state: SiteState) -> Tensor | None:
    """What the rule makes of what it is shown of a tensor."""
    if isinstance(rule, NormRule) and _acts_on_part(rule, value):
        square = add_over_parts(norm(shown, torch.float64).square(), value)
        return rule.rescale(shown, rule.scale(square.sqrt().to(summing_type(value.dtype).to_real()), state))
    return rule(shown, state)


def spread(rule: Rule, value: Tensor, changed: Tensor) -> Tensor:
    """What the rule has made of a tensor, spread as that is."""
    return spread_part(changed, value) if _acts_on_part(rule, value) else spread_whole(changed, value)


def needs_whole(rule: Rule) -> bool:
    """Return whether a rule needs more than this process's part of a tensor."""
    return not rule.is_elementwise or rule.needs_input


def _acts_on_part(rule: Rule, value: Tensor) -> bool:
    if is_summand(value) or rule.needs_input:
        return False
    if isinstance(rule, NormRule):  # the derivative of a norm follows from all elements
        return type(rule).__call__ is NormRule.__call__ and not (grad_enabled() and value.requires_grad)
    return rule.is_elementwise


def _part_of(tensor: Tensor) -> Tensor:
    part: Tensor = local_part(tensor)
    return part


def _whole_of(tensor: Tensor) -> Tensor:
    return whole_of(tensor) if is_sharded(tensor) else tensor
