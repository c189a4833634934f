"""Sequence numbers of nodes that another thread has made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from retrograd.hooks.engine import next_sequence_number
from retrograd.hooks.nodes import is_leaf, number_of, variable_of
from retrograd.hooks.reach import find_nodes, guard_nodes

_CHUNK = 4096


class Numbering:
    """Lets what a backward pass makes in a thread of its own count as made by the thread that asked for it.

    Each thread numbers the nodes that it makes, from 0 on, and the engine takes larger numbers for newer nodes and runs
    them first: the order of its sums, and so their last bits, depend on them.

    Args:
        nodes: those of the pass.
        others: tensors whose graphs the pass may use, but does not make.
    """

    def __init__(self, nodes: Sequence[Any], others: Iterable[Tensor]) -> None:
        self._offset = next_sequence_number()
        self._leaves = [leaf for node in nodes if (leaf := variable_of(node)) is not None]
        self._old = {*nodes, *_find_made([*others, *self._gradients()])}

    def move(self) -> None:
        """Renumber what the gradients of the leaves were made by; in the thread that asked, when the pass is over."""
        made = [node for node in _find_made(self._gradients()) if node not in self._old and not is_leaf(node)]
        for node in made:
            node._set_sequence_nr(number_of(node) + self._offset)
        guard_nodes(made)
        if made:
            _advance(max(map(number_of, made)) + 1)

    def _gradients(self) -> list[Tensor]:
        return [leaf.grad for leaf in self._leaves if leaf.grad is not None]


def _find_made(tensors: Iterable[Tensor]) -> list[Any]:
    return find_nodes([(tensor.grad_fn, 0) for tensor in tensors if tensor.grad_fn is not None]).nodes


def _advance(number: int) -> None:
    """Let the next node that this thread makes have this number: make nodes until it has."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch._C.DisableTorchFunction(),
        _python_dispatch._disable_current_modes(),
    ):
        source = torch.zeros((), device="cpu", requires_grad=True)
        while (missing := number - next_sequence_number()) > 0:
            torch._foreach_neg([source] * min(missing, _CHUNK))
