"""Facts of probes: what a copy of a model answered to a question, and what a Function's backward was held against."""

from __future__ import annotations

from dataclasses import dataclass

from retrograd.core.history.fact import Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Fact):
    """A question to a copy of a model, with the batch of a step. ``name`` is the model.

    ``value`` is 1 where samples or positions depend on others, 0 where they do not, and missing where the question
    could not be asked.

    Attributes:
        question: ``samples`` or ``positions``.
        why_not: it could not be asked.
        called_with: the arguments of the model.
        only_batch_norm: they would not if batch norm took no statistics of the batch.
        operation: the first that mixes them; empty where that was not found.
        module: the path of the module that it is in.
        line: who called it.
        reason: in words.
        shape: of what it makes.
        fits_other: samples along another dimension do not depend on each other, nor on their places.
        has_mask: a triangular mask was at work, or an operation was told to be causal.
        next_token: the targets of that step were the input tokens, one position on.
    """

    kind = "probe"
    question: str = ""
    why_not: str = ""
    called_with: str = ""
    only_batch_norm: bool = False
    operation: str = ""
    module: str = ""
    line: str = ""
    reason: str = ""
    shape: tuple[int, ...] = ()
    fits_other: bool = False
    has_mask: bool = False
    next_token: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCheck(Fact):
    """A Python Function whose backward was held against finite differences. ``name`` is the Function.

    ``value`` is the gradient that backward gives over that of the forward, where it is always the same.

    Attributes:
        verdict: ``right``, ``straight-through``, ``identity``, ``factor``, ``constant``, ``other`` or ``not
            checked``.
        why_not: it was not checked.
        argument: the argument of which the gradient is that.
        is_linear: the forward is linear in it.
        line: where backward returns.
        called: who called the Function.
    """

    kind = "function"
    verdict: str = ""
    why_not: str = ""
    argument: str = ""
    is_linear: bool = False
    line: str = ""
    called: str = ""
