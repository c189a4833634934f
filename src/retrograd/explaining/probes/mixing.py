"""Which elements of what a model returns depend on which places of a batch, by what changes when those change.

An element that changes when one sample changes, and changes when only others do, depends on both. That needs no
knowledge of the dimensions of results inside the model, so the first operation that makes such elements is found too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from retrograd.core.errors import ProbeError
from retrograd.explaining.probes.batch import Arguments, Axis
from retrograd.explaining.probes.result import Mixing
from retrograd.explaining.probes.trial import Made, Outputs, Trial

_ROUNDING = {torch.float16: 2e-2, torch.bfloat16: 2e-2, torch.float64: 1e-9}
_OF_OTHERS = 1e-4
"""By what part of its size rounding may change a number, where shapes inside depend on data; our own choice."""

_HUGE = 1e8
"""Numbers beyond it are those of masks, and no measure of the others."""

_MOVES = frozenset({"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"})
_ROWWISE = frozenset({"linear", "layer_norm", "rms_norm", "addmm"})
"""Operations that add up what stands along the last dimension: they mix what others have put there."""

_MASKS = frozenset({"masked_fill", "where", "tril", "triu", "masked_scatter"})


def changed(one: Tensor, other: Tensor) -> Tensor:
    """Where two tensors of one shape differ by more than rounding: bool, of their shape."""
    differ = (one != other) & ~((one != one) & (other != other))
    if not one.is_floating_point() or not bool(differ.any()):
        return differ
    size = one.abs().double()
    known = size[size < _HUGE]
    usual = torch.maximum(size, known.mean() if known.numel() else size.new_zeros(()))
    distance = (one.double() - other.double()).abs()
    return differ & ~(distance <= _ROUNDING.get(one.dtype, _OF_OTHERS) * usual)


class MixingProbe(ABC):
    """Asks whether places along a dimension depend on others.

    Args:
        trial: runs the model.
        arguments: of the model.
        dim: the dimension of them that is probed.

    Raises:
        ProbeError: the question cannot be answered with these.
    """

    what = ""

    def __init__(self, trial: Trial, arguments: Arguments, dim: int) -> None:
        self._trial, self._arguments = trial, arguments
        self.axis = Axis(arguments, dim, self.what)
        self._variants = self._vary()
        self.base = trial.run(arguments)
        self._norms = trial.norms
        self.along = {keys: at for keys, each in self.base.items() if (at := self._find_dim(each)) is not None}
        if not self.along:
            shapes = ", ".join(str(list(each.shape)) for each in self.base.values()) or "no tensor"
            raise ProbeError(
                f"The model returns {shapes}, nothing with a dimension of size {self.axis.size}.",
                repair=f"probe the part of the model whose output has one place for each of the {self.what}, or name "
                "their dimension: dim=…",
                reason=f"what is returned for one of the {self.what} must be told from what is returned for others.",
            )

    def ask(self) -> Mixing:
        """Run the model on what differs in some places, and compare."""
        runs = [self._run(each) for each in self._variants]
        self._check_alike(self._trial.run(self._arguments))
        pairs = tuple(sorted(self._pairs(self.base, runs)))
        answer: dict[str, Any] = {
            "what": self.what, "called_with": self._arguments.describe(), "pairs": pairs,
            "mixes": bool(self._mixed(self.base, runs)), "has_mask": self._trial.has_mask(self.axis.size),
        }  # fmt: skip
        if not answer["mixes"]:
            return Mixing(**answer | {"pairs": ()})
        without = self._norms > 0 and not self._mixes_without_norm()
        return Mixing(**answer, only_batch_norm=without, **self._locate(without_norm=self._norms > 0 and not without))

    # ---- what differs between the two questions ----

    @abstractmethod
    def _vary(self) -> list[Arguments]:
        """The arguments with other things in some places."""

    @abstractmethod
    def _mixed(self, base: Outputs, runs: Sequence[Outputs]) -> list[Any]:
        """The keys of outputs that depend on what they should not."""

    @abstractmethod
    def _pairs(self, base: Outputs, runs: Sequence[Outputs]) -> set[tuple[int, int]]:
        """The places of outputs and the places that they depend on."""

    @abstractmethod
    def _is_mixed(self, tensors: Sequence[Tensor]) -> bool:
        """Judge one result of an operation, in the run as given and in those that vary."""

    # ---- runs ----

    def _find_dim(self, output: Tensor) -> int | None:
        at = [place for place, size in enumerate(output.shape) if size == self.axis.size]
        return None if not at else self.axis.dim if self.axis.dim in at else at[0]

    def _run(self, arguments: Arguments, **options: Any) -> Outputs:
        outputs = self._trial.run(arguments, **options)
        if any(outputs[keys].shape != self.base[keys].shape if keys in outputs else True for keys in self.along):
            raise ProbeError(
                f"The shapes of what the model returns depend on the {self.what}.",
                repair="give a batch for which they do not: sequences of one length, without padding.",
                reason="what is returned can be compared only if it has the same shape.",
            )
        return outputs

    def _check_alike(self, again: Outputs) -> None:
        if any(bool(changed(self.base[keys], again[keys]).any()) for keys in self.along if keys in again):
            raise ProbeError(
                "The model returns something else when it is called with the same again.",
                repair="call model.eval(), or take out what counts calls or draws from a generator of its own.",
                reason=f"what changes by itself cannot be told from what changes with other {self.what}.",
            )

    def _mixes_without_norm(self) -> bool:
        base = self._trial.run(self._arguments, without_norm=True)
        return bool(self._mixed(base, [self._run(each, without_norm=True) for each in self._variants]))

    # ---- where ----

    def _locate(self, *, without_norm: bool) -> dict[str, Any]:
        """Find the first operation that mixes, among those that an output which is mixed is made of."""
        lists: list[list[Made]] = []
        runs = []
        for each in (self._arguments, *self._variants):
            lists.append([])
            runs.append(self._trial.run(each, lists[-1], without_norm=without_norm))
        first = lists[0]
        known = {number for number, made in enumerate(first) if made.output in self._mixed(runs[0], runs[1:])}
        for number in range(len(first) - 1, -1, -1):
            known |= set(first[number].takes) if number in known else set()
        for number, made in enumerate(zip(*lists, strict=False)):
            if any(each.name != made[0].name or _shapes(each) != _shapes(made[0]) for each in made):
                break
            if number in known and any(map(self._is_mixed, zip(*(each.tensors for each in made), strict=True))):
                return self._describe(first, number)
        return {"reason": "where that happens was not found"}

    def _describe(self, made: list[Made], number: int) -> dict[str, Any]:
        at = made[number]
        reason = f"`{at.name}` is the first operation that makes one number of several {self.what}"
        if at.name == "batch_norm":
            reason = "batch norm takes mean and variance over the batch in training"
        moved = _find_move(made, number, self.axis.size) if at.name in _ROWWISE else None
        if moved is not None:
            reason = f"`{moved.name}` puts several {self.what} into one row, which `{at.name}` adds up"
            at = moved
        return {
            "operation": at.name, "module": at.module, "line": at.line, "reason": reason,
            "shape": tuple(at.tensors[0].shape),
        }  # fmt: skip


def _shapes(made: Made) -> list[torch.Size]:
    return [each.shape for each in made.tensors]


def _find_move(made: list[Made], number: int, size: int) -> Made | None:
    """Find what has put several samples along the last dimension of what an operation takes: a reshape of these."""
    takes = made[number].takes
    while takes:
        at = made[takes[0]]
        if at.name in _MOVES and at.takes:
            before = made[at.takes[0]].tensors[0]
            along = [dim for dim, each in enumerate(before.shape) if each == size]
            if len(along) != 1 or before.numel() != at.tensors[0].numel():
                return None
            places = torch.arange(size).view(-1, *(1,) * (before.dim() - along[0] - 1)).expand(before.shape)
            rows = places.reshape(at.tensors[0].shape)
            return at if bool((rows != rows[..., :1]).any()) else None
        if at.name not in _HANDS_ON:
            return None
        takes = at.takes
    return None


_HANDS_ON = frozenset(
    {"transpose", "permute", "contiguous", "to", "float", "dropout", "squeeze", "unsqueeze", "T", "mT"}
)


class SampleProbe(MixingProbe):
    """Does what is returned for one sample depend on others?"""

    what = "samples"

    def _vary(self) -> list[Arguments]:
        other = self.axis.find_other(0)
        if other is None:
            raise ProbeError(
                "All samples of this batch are the same.",
                repair="give a batch of samples that differ.",
                reason="a sample takes the place of others to see what changes.",
            )
        self._other = other
        one, last = torch.arange(self.axis.size), torch.arange(self.axis.size)
        one[0], last[other] = other, 0
        return [self.axis.take(each) for each in (torch.zeros_like(one), one, last)]

    def _mixed(self, base: Outputs, runs: Sequence[Outputs]) -> list[Any]:
        return [keys for keys in self.along if self._is_mixed([base[keys], *(each[keys] for each in runs)])]

    def _is_mixed(self, tensors: Sequence[Tensor]) -> bool:
        base, others, one, _ = tensors
        return bool((changed(base, others) & changed(base, one)).any())

    def _pairs(self, base: Outputs, runs: Sequence[Outputs]) -> set[tuple[int, int]]:
        found = set()
        for of, run in ((0, runs[1]), (self._other, runs[2])):
            for keys, dim in self.along.items():
                rows = changed(base[keys], run[keys]).movedim(dim, 0).flatten(1).any(1)
                found |= {(row, of) for row in rows.nonzero().flatten().tolist() if row != of}
        return found

    def is_anonymous(self) -> bool:
        """Check that samples do not depend on each other, nor on their places, as along a dimension of samples."""
        if self.ask().mixes:
            return False
        places = torch.arange(self.axis.size)
        places[0], places[self._other] = self._other, 0
        self._trial.model.eval()  # the draws of dropout belong to places
        base, swapped = self._trial.run(self._arguments), self._trial.run(self.axis.take(places))
        pairs = [
            (base[keys].index_select(dim, places.to(base[keys].device)), swapped[keys])
            for keys, dim in self.along.items()
        ]
        return all(one.shape == other.shape and not bool(changed(one, other).any()) for one, other in pairs)


class PositionProbe(MixingProbe):
    """Does what is returned for one position depend on later ones?"""

    what = "positions"

    def _vary(self) -> list[Arguments]:
        size, half = self.axis.size, self.axis.size // 2
        self._places = sorted({1, half, min(half + 1, size - 1), size - 1} - {0})
        found = []
        for place in self._places:
            other = self.axis.find_other(place)
            if other is None:
                raise ProbeError(
                    "All positions of this batch are the same.",
                    repair="give sequences of tokens that differ.",
                    reason="another token takes the place of one to see what changes.",
                )
            places = torch.arange(size)
            places[place] = other
            found.append(self.axis.take(places))
        return found

    def _mixed(self, base: Outputs, runs: Sequence[Outputs]) -> list[Any]:
        return [keys for keys in self.along if any(keys in seen for _, _, seen in self._leaks(base, runs))]

    def _pairs(self, base: Outputs, runs: Sequence[Outputs]) -> set[tuple[int, int]]:
        return {(position, place) for position, place, _ in self._leaks(base, runs)}

    def _leaks(self, base: Outputs, runs: Sequence[Outputs]) -> list[tuple[int, int, list[Any]]]:
        """Positions of outputs with a later place that they depend on, and the keys of the output."""
        found = []
        for place, run in zip(self._places, runs, strict=True):
            for keys, dim in self.along.items():
                rows = changed(base[keys], run[keys]).movedim(dim, 0)[:place].flatten(1).any(1)
                found += [(row, place, [keys]) for row in rows.nonzero().flatten().tolist()]
        return found

    def _is_mixed(self, tensors: Sequence[Tensor]) -> bool:
        """Judge a result in which one dimension alone can be that of positions."""
        at = [place for place, size in enumerate(tensors[0].shape) if size == self.axis.size]
        if len(at) != 1:
            return False
        early = [each.movedim(at[0], 0) for each in tensors]
        return any(
            bool(changed(early[0][:place], run[:place]).any())
            for place, run in zip(self._places, early[1:], strict=True)
        )

    def _describe(self, made: list[Made], number: int) -> dict[str, Any]:
        """Name a mask without effect where there is one: it is the cause."""
        found = super()._describe(made, number)
        at = made[number]
        before = [
            each for each in made[:number] if each.name in _MASKS and not each.is_used and each.module == at.module
        ]
        if at.name == "batch_norm":
            return found
        if before:
            reason = f"the result of `{before[-1].name}` is not used, and nothing else hides later positions"
            return found | {"operation": before[-1].name, "line": before[-1].line, "reason": reason}
        return found | {
            "reason": f"`{at.name}` is the first operation whose result at a position depends on later ones"
        }
