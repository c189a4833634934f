"""What losses are given as targets, beside the tokens that the model was given, at looks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograd.core.history.data_facts import SHIFTS, AttendedTokens, Targets
from retrograd.core.history.facts import MADE_BEFORE, Operation
from retrograd.core.hooks.dispatch import carry_out_unseen, without_graph
from retrograd.core.hooks.torch_calls import TorchCall
from retrograd.core.recording.deliveries import Arrays
from retrograd.core.recording.fact_source import FactHost
from retrograd.explaining.facts.value_look import ValueLook, is_readable

_MOST = 8
"""Tensors of tokens, inputs and masks that are held between a forward and its pass, and losses that are seen."""

_ELEMENTS = 1 << 20
"""Targets, tokens and positions of the largest tensor that is read."""

_LONGER = 3
"""Tokens that a row may have more than targets: those that were shifted away."""

_FEW = 8
"""Targets from which on a batch of one class is worth another look."""

_DOUBTS = 4
"""Looks at which all is well until no more are wanted, after as many at which something was odd."""

_OF_CLASSES = ("cross_entropy", "nll_loss")
_OF_NUMBERS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
               "binary_cross_entropy_with_logits")  # fmt: skip
_PICKS = ("gather", "take_along_dim", "getitem")
_HANDED_ON = ("log_softmax", "view", "reshape", "flatten", "squeeze", "getitem", "float", "transpose", "permute")
_LARGE = 1 << 30
"""More than any token is."""

_HIDES = -1e4
"""A score of attention that is this low, or lower, hides what it is of."""


class _Tokens(NamedTuple):
    """Integers that an embedding was asked for: their line, and of how many rows it is."""

    numbers: Tensor
    line: str
    rows: int


class _Mask(NamedTuple):
    """A padding mask: true where attention may take a position, shape ``[batch, positions]``."""

    keeps: Tensor
    line: str
    module: str


@dataclass(frozen=True, slots=True)
class _Seen:
    """A fact without its numbers, and these on their device: eight, then eight for each arrangement."""

    fact: Targets
    numbers: Tensor
    arranged: tuple[tuple[str, int], ...] = ()


class TargetLooks(ValueLook):
    """Holds targets of losses against the tokens that were looked up, and padding masks, too."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._tokens: list[_Tokens] = []
        self._masks: list[_Mask] = []
        self._given: list[Tensor] = []
        self._logs: set[int] = set()
        self._seen: list[_Seen] = []
        self._attended: list[tuple[AttendedTokens, Tensor]] = []
        self._doubts = 0

    def see(self, number: int, noted: Operation, call: TorchCall) -> None:
        """Keep what of an operation has to do with targets."""
        if number == 0:
            self.forget()
        name = noted.name
        if name in ("embedding", "one_hot", "getitem"):
            self._see_tokens(noted, call)
        if name in _HANDED_ON and (name == "log_softmax" or (noted.operands and noted.operands[0] in self._logs)):
            self._logs.add(number)
        if name in _OF_CLASSES or name in _OF_NUMBERS:
            self._see_loss(noted, call)
        elif name in _PICKS and noted.operands and noted.operands[0] in self._logs:
            self._see_picked(noted, call)
        elif name.startswith("masked_fill") or name == "scaled_dot_product_attention":
            self._see_mask(noted, call)
        if MADE_BEFORE in noted.operands and len(self._given) < _MOST:
            self._see_given(noted, call)

    def pass_begins(self, noted: Sequence[Operation], loss: int) -> None:
        """Hold masks against tokens, and let go of both."""
        for mask in self._masks:
            tokens = [each for each in self._tokens if each.numbers.shape == mask.keeps.shape and each.rows]
            if tokens:
                fact = AttendedTokens(name=mask.module, line=mask.line, moment=self.host.now)
                self._attended.append((fact, carry_out_unseen(lambda: _count_attended(tokens[0], mask.keeps))))  # noqa: B023
        self.forget()

    def drain(self) -> None:
        """Record one fact for each loss, and for each mask."""
        seen, self._seen = self._seen, []
        attended, self._attended = self._attended, []
        if seen:
            self.host.deliveries.add([each.numbers for each in seen], partial(self._note_targets, seen))
        if attended:
            masks = [mask for mask, _ in attended]
            self.host.deliveries.add([numbers for _, numbers in attended], partial(self._note_attended, masks))

    def _note_targets(self, seen: Sequence[_Seen], arrays: Arrays) -> None:
        facts = [_read_targets(each, numbers.tolist()) for each, numbers in zip(seen, arrays, strict=True)]
        self._doubts = max(0, min(_DOUBTS, self._doubts + (1 if any(map(_is_odd, facts)) else -1)))
        self.is_wanted = self._doubts > 0
        for fact in facts:
            self.host.note_fact(fact)

    def _note_attended(self, masks: Sequence[AttendedTokens], arrays: Arrays) -> None:
        for mask, numbers in zip(masks, arrays, strict=True):
            share, kept, hidden, only, lengths = numbers.tolist()
            self.host.note_fact(
                replace(mask, value=share, kept=int(kept), hidden=int(hidden), only=int(only), lengths=int(lengths))
            )

    def forget(self) -> None:
        """Let go of what the model was given."""
        self._tokens.clear()
        self._masks.clear()
        self._given.clear()
        self._logs.clear()

    def _see_tokens(self, noted: Operation, call: TorchCall) -> None:
        if noted.name == "getitem":
            table, index = call.args[0], call.args[1]
            if not isinstance(table, Tensor) or not table.requires_grad or not isinstance(index, Tensor):
                return
            numbers, rows = index, len(table)
        else:
            numbers, rows = call.operands[0], 0
            if noted.name == "embedding":
                rows = len(call.operands[1])
        if len(self._tokens) < _MOST and _holds_integers(numbers) and 0 < numbers.ndim <= 2 and numbers.numel() > 1:
            self._tokens.append(_Tokens(without_graph(numbers), noted.line, rows))

    def _see_given(self, noted: Operation, call: TorchCall) -> None:
        for tensor, made in zip(call.operands, noted.operands, strict=False):
            is_plain = made == MADE_BEFORE and is_readable(tensor) and tensor.is_floating_point()
            if is_plain and not tensor.requires_grad and tensor.ndim > 1 and noted.module:
                self._given.append(without_graph(tensor))

    def _see_loss(self, noted: Operation, call: TorchCall) -> None:
        scores, target = _argument(call, 0, "input"), _argument(call, 1, "target")
        if len(self._seen) >= _MOST or not (isinstance(scores, Tensor) and isinstance(target, Tensor)):
            return
        if not is_readable(target) or not is_readable(scores):
            return
        if noted.name in _OF_CLASSES and _holds_integers(target):
            classes = scores.shape[1] if scores.ndim > 1 else scores.shape[0]
            ignored = call.kwargs.get("ignore_index", call.args[4] if len(call.args) > 4 else -100)
            self._compare(noted, call, target, classes, int(ignored))
        elif noted.name in _OF_NUMBERS:
            same = any(_is_same(target, each) for each in self._given)
            self._keep(_describe(noted, target, same=same), _read_loss(call), [], ())

    def _see_picked(self, noted: Operation, call: TorchCall) -> None:
        scores = call.args[0] if call.args else None
        found = [each for each in call.operands[1:] if is_readable(each) and _holds_integers(each)]
        if noted.name == "getitem" and len(found) < 2:
            return
        if isinstance(scores, Tensor) and found and len(self._seen) < _MOST:
            target = found[-1].squeeze(-1) if noted.name != "getitem" and found[-1].ndim > 1 else found[-1]
            dim = _argument(call, 1, "dim") if noted.name == "gather" else -1
            self._compare(noted, call, target, scores.shape[dim], -100)

    def _see_mask(self, noted: Operation, call: TorchCall) -> None:
        keeps = _find_keeps(noted.name, call)
        if keeps is not None and len(self._masks) < _MOST:
            self._masks.append(_Mask(keeps, noted.line, noted.module))

    def _compare(self, noted: Operation, call: TorchCall, target: Tensor, classes: int, ignored: int) -> None:
        target = without_graph(target)
        arrange = partial(_arrange, target, self._tokens)
        ways = carry_out_unseen(lambda: list(arrange())) if target.numel() <= _ELEMENTS else []

        def count() -> list[Tensor]:
            numbers, most = _count_classes(target.reshape(-1)[:_ELEMENTS], classes, ignored)
            return [numbers, *(_count_rows(rows, tokens, most, ignored) for _, _, rows, tokens in ways)]

        fact = _describe(noted, target, classes=classes)
        self._keep(fact, _read_loss(call), count, tuple((line, axis) for line, axis, _, _ in ways))

    def _keep(self, fact: Targets, loss: Tensor, count: Any, arranged: tuple[tuple[str, int], ...]) -> None:
        def gather() -> Tensor:
            return torch.cat([loss, *(count() if count else ())])

        self._seen.append(_Seen(replace(fact, moment=self.host.now), carry_out_unseen(gather), arranged))


def _argument(call: TorchCall, place: int, name: str) -> Any:
    return call.args[place] if len(call.args) > place else call.kwargs.get(name)


def _holds_integers(tensor: Tensor) -> bool:
    return is_readable(tensor) and tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)


def _describe(noted: Operation, target: Tensor, **fields: Any) -> Targets:
    dtype = str(target.dtype).removeprefix("torch.")
    loss = "gather" if noted.name in _PICKS else noted.name
    return Targets(name=noted.module, loss=loss, line=noted.line, dtype=dtype, elements=target.numel(), **fields)


def _read_loss(call: TorchCall) -> Tensor:
    """The loss, as one number; NaN where it is several."""
    result = call.result
    if isinstance(result, Tensor) and result.numel() == 1 and call.name not in _PICKS:
        found = without_graph(result)
        return carry_out_unseen(lambda: found.reshape(1).double())
    return carry_out_unseen(lambda: torch.full((1,), math.nan, dtype=torch.float64, device=call.operands[0].device))


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same elements of the same memory."""
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel() and one.dtype == other.dtype


def _arrange(target: Tensor, held: Sequence[_Tokens]) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """Targets as rows beside those of tokens, along each dimension in which they fit.

    Yields:
        line and dimension of the tokens, targets of shape ``[rows, length]``, tokens of shape ``[rows, length + k]``.
    """
    flat, many = target.reshape(-1), target.numel()
    for each in held:
        tokens = each.numbers if each.numbers.ndim == 2 else each.numbers[None]
        if tokens.device != target.device or tokens.numel() > _ELEMENTS:
            continue
        first, last = tokens.shape
        if many % first == 0 and many // first > 1 and 0 <= last - many // first <= _LONGER:
            yield each.line, each.numbers.ndim - 1, flat.view(first, -1), tokens
        if each.numbers.ndim == 2 and many % last == 0 and many // last > 1 and 0 <= first - many // last <= _LONGER:
            yield each.line, 0, flat.view(-1, last).t(), tokens.t()


def _count_classes(flat: Tensor, classes: int, ignored: int) -> tuple[Tensor, Tensor]:
    """How many are ignored, how many classes there are, the most frequent one, how often it is there; and that one."""
    is_valid = flat != ignored
    counts = torch.zeros(classes + 1, dtype=torch.int64, device=flat.device)
    places = torch.where(is_valid, flat.long(), classes).clamp(0, classes)
    counts.index_add_(0, places, torch.ones_like(places))
    highest, most = counts[:classes].max(0)
    numbers = [(~is_valid).sum(), (counts[:classes] > 0).sum(), most, highest, is_valid.sum()]
    return torch.stack(numbers).double(), most


def _count_rows(rows: Tensor, tokens: Tensor, most: Tensor, ignored: int) -> Tensor:
    """Of each shift how many targets are equal, and how many there are; how many stand in tails; how many lengths."""
    length, longest = rows.shape[1], tokens.shape[1]
    is_valid = rows != ignored
    found: list[Tensor] = []
    for shift in SHIFTS:
        first, last = max(0, -shift), max(0, -shift, min(length, longest - shift))
        valid = is_valid[:, first:last]
        equal = rows[:, first:last] == tokens[:, first + shift : last + shift]
        found += [(equal & valid).sum(), valid.sum()]
    is_most = (rows == most) & is_valid
    goes_on = (~(is_most | ~is_valid)).flip(1).cumsum(1).flip(1) > 0
    lengths = goes_on.sum(1).sort().values
    inner, beside = ~goes_on[:, :-1], tokens[:, 1:length].long()  # beside the first of a tail may be the last before
    least, most_beside = beside.masked_fill(~inner, _LARGE).min(), beside.masked_fill(~inner, -1).max()
    found += [(is_most & ~goes_on).sum(), 1 + (lengths[1:] != lengths[:-1]).sum(), least == most_beside]
    return torch.stack([each.long() for each in found]).double()


def _read_targets(seen: _Seen, numbers: list[float]) -> Targets:
    fact = replace(seen.fact, value=numbers[0])
    if len(numbers) == 1:
        return fact
    ignored, classes, most, highest, valid = numbers[1:6]
    share = highest / valid if valid else math.nan
    fact = replace(fact, ignored=int(ignored), seen=int(classes), most=int(most), share=share)
    width, best = 2 * len(SHIFTS) + 3, -1.0
    for place, (line, axis) in enumerate(seen.arranged):
        own = numbers[6 + place * width : 6 + (place + 1) * width]
        equal, counted = own[0:-3:2], own[1:-3:2]
        shifts = tuple(e / n if n else -1.0 for e, n in zip(equal, counted, strict=True))
        if max(shifts) > best:
            best = max(shifts)
            tail = own[-3] / highest if highest else math.nan
            fact = replace(fact, shifts=shifts, tokens=line, axis=axis, tail=tail)
            fact = replace(fact, lengths=int(own[-2]), filler=own[-1] > 0)
    return fact


def _is_odd(fact: Targets) -> bool:
    """Return whether more looks would tell more."""
    is_one_class = fact.seen == 1 and fact.elements >= _FEW
    is_copied = any(fact.shifts[SHIFTS.index(each)] == 1.0 for each in (0, 2)) if fact.shifts else False
    return is_one_class or is_copied or (fact.share > 0.4 and fact.tail > 0.99)


# ---- padding masks ----


def _find_keeps(name: str, call: TorchCall) -> Tensor | None:
    """Where attention may take a position, of shape ``[batch, positions]``; None where that is no padding mask."""
    if name == "scaled_dot_product_attention":
        mask, is_hiding = _argument(call, 3, "attn_mask"), False
    else:
        value = _argument(call, 2, "value")
        if isinstance(value, Tensor) or not isinstance(value, int | float) or value > _HIDES:
            return None
        mask, is_hiding = _argument(call, 1, "mask"), True
    if not isinstance(mask, Tensor) or not is_readable(mask) or not 2 <= mask.ndim <= 4:
        return None
    plain = without_graph(mask)
    while plain.ndim > 2:  # of heads and queries the last: it may take all that stand before it
        plain = plain.select(1, -1)

    def convert() -> Tensor:
        if plain.dtype == torch.bool:
            return ~plain if is_hiding else plain
        return plain > _HIDES

    return carry_out_unseen(convert) if plain.numel() <= _ELEMENTS else None


def _count_attended(tokens: _Tokens, keeps: Tensor) -> Tensor:
    def spot(where: Tensor) -> Tensor:
        places = torch.where(where, tokens.numbers.long(), tokens.rows)
        found = torch.zeros(tokens.rows + 1, dtype=torch.int64, device=keeps.device)
        return found.index_fill_(0, places.reshape(-1), 1)[:-1]

    kept, hidden = spot(keeps), spot(~keeps)
    lengths = keeps.sum(1).sort().values
    numbers = [kept.sum(), hidden.sum(), kept.argmax(), 1 + (lengths[1:] != lengths[:-1]).sum()]
    return torch.cat([keeps.double().mean().reshape(1), torch.stack(numbers).double()])
