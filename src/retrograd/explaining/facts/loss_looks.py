"""The numbers that a loss is made of, at looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from retrograd.core.groups import reach
from retrograd.core.history.data_facts import LossParts
from retrograd.core.history.facts import Operation
from retrograd.core.hooks.dispatch import carry_out_unseen, without_graph
from retrograd.core.hooks.engine import inference_enabled, is_transformed, without_functions
from retrograd.core.hooks.torch_calls import TorchCall, user_line
from retrograd.core.recording.deliveries import Arrays
from retrograd.core.recording.fact_source import FactHost
from retrograd.explaining.facts.value_look import ValueLook

_MOST = 256
"""Results between a forward and an update that are kept."""

_SUMS = frozenset({"add", "sub", "__add__", "__sub__", "__radd__", "radd"})
_IN_PLACE = frozenset({"__iadd__", "__isub__", "add_", "sub_", "iadd", "isub"})
_JOINS = frozenset({"stack", "cat", "hstack"})
_DIFFERENCES = frozenset({"sub", "__sub__", "subtract"})
_RATIOS = frozenset({"div", "__truediv__", "true_divide", "divide"})
_LEAVING = frozenset({"item", "__float__", "tolist", "numpy"})
_DISTANCES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})


class _Pass(NamedTuple):
    """A backward pass, with what is known of its loss; the tensor holds as many numbers as there are numbers."""

    fact: LossParts
    sums: tuple[int, ...]
    pairs: tuple[int, ...]
    values: Tensor


class LossLooks(ValueLook):
    """Keeps the single numbers behind a forward, and whether two tensors that are held against each other are equal."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._sums: dict[int, Tensor] = {}
        self._pairs: dict[int, Tensor] = {}
        self._passes: list[_Pass] = []
        self._last = -1

    def see(self, number: int, noted: Operation, call: TorchCall) -> None:
        """Keep what it made, if that is a single number; the sums of what it adds up, if these are none."""
        if number <= self._last:
            self._sums.clear()
            self._pairs.clear()
        self._last = number
        made = call.made[0]
        if len(self._sums) + len(self._pairs) >= _MOST or not _is_readable(made):
            return
        if made.ndim == 0:
            self._sums[number] = _add_up(made)
        elif not noted.module and noted.name in _SUMS:
            for maker, operand in zip(noted.operands, call.operands, strict=False):
                if maker >= 0 and maker not in self._sums and _is_readable(operand):
                    self._sums[maker] = _add_up(operand)
        if _may_be_equal(noted, call):
            first, second = call.operands[:2]
            if _is_readable(first) and _is_readable(second):
                self._pairs[number] = _compare(first, second)

    def pass_begins(self, noted: Sequence[Operation], loss: int) -> None:
        """Keep what the loss is made of, in one tensor."""
        if not 0 <= loss < len(noted) or loss not in self._sums:
            return
        before = reach((loss,), lambda number: (each for each in noted[number].operands if 0 <= each < len(noted)))
        before.update(each for one in noted if one.name in _LEAVING for each in one.operands[:1])
        sums, pairs = (tuple(sorted(before & held.keys())) for held in (self._sums, self._pairs))
        kept = [*(self._sums[each] for each in sums), *(self._pairs[each] for each in pairs)]
        self.is_wanted |= _has_terms(noted, before & self._sums.keys())
        fact = LossParts(line=noted[loss].line, called=user_line(), loss=loss, moment=self.host.now)
        with without_functions():
            if len({each.device for each in kept}) == 1:
                self._passes.append(_Pass(fact, sums, pairs, carry_out_unseen(lambda: torch.stack(kept))))

    def drain(self) -> None:
        """Record a fact for each pass."""
        passes, self._passes = self._passes, []
        with without_functions():
            self.host.deliveries.add([each.values for each in passes], partial(self._note, passes))

    def _note(self, passes: Sequence[_Pass], arrays: Arrays) -> None:
        for (fact, sums, pairs, _), values in zip(passes, arrays, strict=True):
            listed = values.tolist()
            same = tuple(number for number, is_equal in zip(pairs, listed[len(sums) :], strict=True) if is_equal)
            self.is_wanted |= bool(same)
            numbers = tuple(listed[: len(sums)])
            value = listed[sums.index(fact.loss)]
            self.host.note_fact(replace(fact, value=value, numbers=sums, values=numbers, equal=same))


def _is_readable(tensor: Tensor) -> bool:
    """Check whether numbers can be read; of no_grad, too, where terms without a graph are made."""
    is_plain = type(tensor) is Tensor and not is_transformed(tensor) and tensor.layout is torch.strided
    is_there = is_plain and tensor.numel() > 0 and not tensor.is_meta and not inference_enabled()
    return is_there and tensor.is_floating_point()


def _may_be_equal(noted: Operation, call: TorchCall) -> bool:
    if noted.name not in _DIFFERENCES | _RATIOS | _DISTANCES or len(call.operands) < 2:
        return False
    first, second = call.operands[:2]
    return first.requires_grad and second.requires_grad and first.shape == second.shape


def _add_up(tensor: Tensor) -> Tensor:
    plain = without_graph(tensor)
    return carry_out_unseen(lambda: plain.sum(dtype=torch.float32))


def _compare(first: Tensor, second: Tensor) -> Tensor:
    one, other = without_graph(first), without_graph(second)
    return carry_out_unseen(lambda: (one == other).all().float())


def _has_terms(noted: Sequence[Operation], single: set[int]) -> bool:
    """Check whether a single number is a sum of several, as a loss with terms is."""
    return any(
        noted[each].name in _JOINS | _SUMS | _IN_PLACE and len(noted[each].operands) > 1 and not noted[each].module
        for each in single
    )
