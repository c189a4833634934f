"""``rg.find_nan``: the first operation that makes a number that is not finite, in one forward and backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.errors import ProbeError
from retrograd.core.guesses import names_arguments
from retrograd.core.history.facts import NonFinite, read_facts
from retrograd.core.history.history import History
from retrograd.core.hooks.backward import unheard
from retrograd.core.hooks.isolation import copy_nest, isolated_autograd, unseen_by_discovery
from retrograd.core.hooks.nested import flatten
from retrograd.core.randomness import random_kept
from retrograd.core.recording.recorder import Recorder
from retrograd.core.runs.findings import shorten_line
from retrograd.explaining.facts.nonfinite_watch import NonFiniteWatch
from retrograd.explaining.probes.batch import read_batch
from retrograd.explaining.probes.trial import copy_for_trial


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """Where the first number is made that is not finite.

    Attributes:
        born: ``input``, ``forward`` or ``backward``.
        operation: torch function, or node of the backward pass.
        module: the path of the module that it is in; empty outside of the model.
        line: who called it in the forward, ``file:line``.
        reason: why, in terms of values: ``log of 0``; empty where no rule knows it.
        operands: what was seen of each operand.
        made: ``NaN``, ``inf`` or ``−inf``.
    """

    born: str
    operation: str
    module: str
    line: str
    reason: str
    operands: Mapping[str, str]
    made: str

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.module, shorten_line(self.line) if self.line else "")))
        seen = "".join(f"\n  {name}: {each}" for name, each in self.operands.items())
        verb = "takes" if self.born == "input" else "makes"
        return (
            f"`{self.operation}` {verb} {self.made or 'a number that is not finite'} in the "
            f"{'forward' if self.born == 'input' else self.born}"
            f"{f' ({where})' if where else ''}{f': {self.reason}' if self.reason else ''}{seen}"
        )


@names_arguments
def find_nan(model: nn.Module, batch: Any, loss: Callable[..., Any] | None = None) -> NotFinite | None:
    """Find the first operation of a forward and its backward that makes a number that is not finite.

    A copy of the model runs once, and every operation is watched; the model, its gradients and the random state stay
    as they are::

        print(rg.find_nan(model, (images, labels), lambda output: F.cross_entropy(output, labels)))

    A mask of −inf is none, nor is what reaches neither the loss nor a gradient.

    Args:
        model: in the mode in which it is to be run.
        batch: what it is called with, as for :func:`retrograd.check_batch`.
        loss: a function of what the model returns, or of that and the batch, that returns a number to begin backward
            from. By default ``output.loss`` or ``output["loss"]`` if there is one, else the sum of all floating
            tensors that the model returns.

    Returns:
        What is found; None where all numbers are finite.

    Raises:
        ProbeError: the model cannot be copied, or there is nothing to begin backward from.
    """
    copied = copy_for_trial(model)
    arguments = read_batch(copied, batch)
    args, kwargs, given = copy_nest((arguments.args, arguments.kwargs, batch), lambda each: each.detach().clone())
    history = History()
    with random_kept(), unseen_by_discovery(), unheard(), isolated_autograd():
        recorder = Recorder(copied, history, sources=(NonFiniteWatch,))
        recorder.attach()
        try:
            value = _find_loss(loss, copied(*args, **kwargs), given)
            value.backward()
        finally:
            recorder.close()
    found = next((each for each in read_facts(history.events) if isinstance(each, NonFinite)), None)
    return None if found is None else _describe(found)


def _describe(found: NonFinite) -> NotFinite:
    operands = {name: str(each) for name, each in found.operands.items()}
    return NotFinite(
        born=found.born, operation=found.operation, module=found.name, line=found.line, reason=found.reason,
        operands=operands, made=found.made,
    )  # fmt: skip


def _find_loss(loss: Callable[..., Any] | None, output: Any, batch: Any) -> Tensor:
    if loss is None:
        value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(value, Tensor):
            made = [each.sum() for _, each in flatten(output, ()) if each.is_floating_point() and each.requires_grad]
            value = torch.stack([each.float() for each in made]).sum() if made else None
    else:
        value = loss(output, batch) if _takes_two(loss) else loss(output)
    if not isinstance(value, Tensor) or not value.requires_grad or value.numel() != 1:
        raise ProbeError(
            f"There is no number to begin backward from: the loss is {_show(value)}.",
            repair="give loss=, a function of what the model returns, and let parameters require grad.",
            reason="the backward pass is a part of what is searched.",
        )
    return value


def _takes_two(loss: Callable[..., Any]) -> bool:
    try:
        inspect.signature(loss).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def _show(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"of shape {list(value.shape)}" if value.numel() != 1 else "a tensor without a graph"
