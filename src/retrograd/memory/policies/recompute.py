"""Drop what a module saves, and run its forward again when the backward pass needs it; raise where the two differ.

The second run draws the same random numbers as the first: torch's own checkpoint puts back torch's generators, and
those of Python and NumPy are put back here. Generators that a module holds itself cannot all be found. Of each tensor
that is saved a few elements are kept, which tell whether the recomputed one is the same; no device is waited for.
"""

from __future__ import annotations

import ctypes
import math
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from retrograd.core.errors import OverwrittenError, RecomputeError
from retrograd.core.hooks.dispatch import plain_torch
from retrograd.core.hooks.engine import dispatch_modes
from retrograd.core.hooks.saved import is_plain
from retrograd.memory.policies.overwriting import FILLED_LATE, SaveSite, refuse_overwritten
from retrograd.memory.policies.policy import Packed, Policy, Saved

Stays = Callable[[Tensor, torch.UntypedStorage], bool]
"""Whether a tensor lies in memory that stays anyway."""

_BYTES_OF_MT19937 = 624 * 4 + 4


class GeneratorState(NamedTuple):
    """The state of a generator. It is compared by its identity: what is unchanged is read as the same object.

    Attributes:
        key: tells it from others, at less cost than the values.
        values: as the generator gives and takes them.
    """

    key: Any
    values: Any


NOT_LOADED = GeneratorState(None, None)


class _Python:
    """The generator behind the functions of ``random``."""

    def __init__(self) -> None:
        self._last = NOT_LOADED

    def read(self) -> GeneratorState:
        """Read the state, in 20 µs. A state has 20 kB, and is the same for many calls."""
        values, last = random.getstate(), self._last
        if values != last.key:
            last = self._last = GeneratorState(values, values)
        return last

    def write(self, state: GeneratorState) -> None:
        """Draw from here."""
        random.setstate(state.values)


class _Numpy:
    """The generator behind the functions of ``numpy.random``, as soon as the program has loaded it."""

    def __init__(self) -> None:
        self._last = NOT_LOADED

    def read(self) -> GeneratorState:
        """Read the state, in 3 µs; 80 µs if something was drawn since.

        Of normal numbers two are drawn, and one may wait. The bits do not tell, so while one waits all is read.
        """
        numpy, last = sys.modules.get("numpy.random"), self._last
        if numpy is None:
            return NOT_LOADED
        bits = _read_bits(numpy)
        if bits is not None and last.key == (bits, 0, 0.0):
            return last
        values = numpy.get_state(legacy=False)
        waiting = values["has_gauss"], values["gauss"]
        key = (bits if bits is not None else pickle.dumps(values["state"]), *waiting)
        if key != last.key:
            last = self._last = GeneratorState(key, values)
        return last

    def write(self, state: GeneratorState) -> None:
        """Draw from here."""
        sys.modules["numpy.random"].set_state(state.values)


def _read_bits(numpy: Any) -> bytes | None:
    """The memory of NumPy's usual generator; None for others, whose memory is laid out otherwise."""
    generator = numpy.get_bit_generator()
    return (
        ctypes.string_at(generator.ctypes.state_address, _BYTES_OF_MT19937)
        if type(generator) is numpy.MT19937
        else None
    )


_GENERATORS = (_Python(), _Numpy())


class DrawnNumbers:
    """The random numbers of one forward. Made before it.

    A generator that it leaves alone is left alone when it runs again: other threads may be drawing from it.
    """

    __slots__ = ("_begin",)

    def __init__(self) -> None:
        self._begin = [(generator, generator.read()) for generator in _GENERATORS]

    def end(self) -> None:
        """Record that the forward is over."""
        before = [(generator, state) for generator, state in self._begin if state is not NOT_LOADED]
        self._begin = [(generator, state) for generator, state in before if generator.read() is not state]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers inside of it; the generators are afterwards as they were before."""
        now = [(generator, generator.read()) for generator, _ in self._begin]
        try:
            for generator, state in self._begin:
                generator.write(state)
            yield
        finally:
            for generator, state in now:
                generator.write(state)


_ELEMENTS = 16
_MOST_OF_A_DIMENSION = 4
Sample = Tensor | list[Any]
Layout = tuple[list[int], list[int]]
"""Sizes and strides."""


def take_sample(tensor: Tensor) -> Sample | None:
    """Take some elements of a plain tensor; None where there are none, or where the device cannot be asked.

    Of a tensor on a CUDA device it is a vector in float64 there, which is not waited for. Else numbers, for to compare
    these takes a tenth of the time.
    """
    device = tensor.device.type
    if not tensor.numel() or device not in ("cpu", "cuda"):
        return None
    if device == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    take = _take_numbers if device == "cpu" else _take_vector
    if not dispatch_modes():
        return take(tensor.detach())
    with plain_torch():
        return take(tensor)


def _take_numbers(tensor: Tensor) -> list[Any]:
    numbers: list[Any] = tensor.as_strided(*_choose_distinct(tensor.size(), tensor.stride())).tolist()
    return numbers


def _take_vector(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    some = tensor.as_strided(*_choose(tensor.size(), tensor.stride()))
    return some.to(torch.float64, copy=True).flatten()[:_ELEMENTS]


def _choose(size: torch.Size, stride: tuple[int, ...]) -> Layout:
    """Choose equally many of every tensor, so that samples can be stacked: what has fewer gives them several times."""
    sizes, strides = _choose_distinct(size, stride)
    count = math.prod(sizes)
    return ([math.ceil(_ELEMENTS / count), *sizes], [0, *strides]) if count < _ELEMENTS else (sizes, strides)


@lru_cache(maxsize=4096)
def _choose_distinct(size: torch.Size, stride: tuple[int, ...]) -> Layout:
    """At equal distances in memory, from its first to about its last; a grid where memory has gaps."""
    total = math.prod(size)
    if total == 1 + sum((each - 1) * step for each, step in zip(size, stride, strict=True)):
        count = min(total, _ELEMENTS)
        return [count], [max(1, (total - 1) // max(1, count - 1))]
    sizes, strides, left = [], [], _ELEMENTS
    for each, step in sorted(zip(size, stride, strict=True), reverse=True):
        count = min(each, left, _MOST_OF_A_DIMENSION)
        left //= count
        sizes.append(count)
        strides.append(step * max(1, (each - 1) // max(1, count - 1)))
    return sizes, strides


def tolerance_of(dtype: torch.dtype) -> float:
    """The distance that elements may have, relative to the largest: more than rounding in another order gives."""
    return float(torch.finfo(dtype).eps) ** 0.5 if dtype.is_floating_point or dtype.is_complex else 0.0


def numbers_are_apart(first: list[Any], second: list[Any], tolerance: float) -> bool:
    """Return whether samples of numbers differ by more than the tolerance."""
    if first == second:
        return False
    with plain_torch():
        one, other = (torch.tensor(each, device="cpu").flatten() for each in (first, second))
        if not one.is_complex():
            one, other = one.double(), other.double()
        return bool(are_apart(one, other, tolerance))


def are_apart(first: Tensor, second: Tensor, tolerance: float) -> Tensor:
    """Return whether samples differ by more than the tolerance, each row by itself. A NaN tells nothing."""
    with plain_torch():
        return (second - first).abs().amax(-1) > tolerance * first.abs().amax(-1)


_MOST_NOTED = 64
"""Pairs that are compared at once, by six kernels."""
Key = tuple[torch.cuda.Stream, float]


class _Pair(NamedTuple):
    first: Tensor
    second: Tensor
    site: SaveSite


class _Question(NamedTuple):
    answered: torch.cuda.Event
    are_apart: Tensor
    sites: list[SaveSite]


class LateComparison:
    """Pairs of samples, and the answers that are in flight to the host."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: dict[Key, list[_Pair]] = {}
        self._asked: list[_Question] = []

    def note(self, first: Tensor, second: Tensor, dtype: torch.dtype, site: SaveSite) -> SaveSite | None:
        """Compare two samples some time.

        Returns:
            A site of which earlier samples were not the same, if that is known by now.
        """
        key = torch.cuda.current_stream(second.device), tolerance_of(dtype)
        with self._lock:
            pairs = self._noted.setdefault(key, [])
            pairs.append(_Pair(first, second, site))
            if len(pairs) >= _MOST_NOTED:
                self._asked.append(_ask(key, self._noted.pop(key)))
            return self._read(is_end=False)

    def end(self) -> SaveSite | None:
        """Wait for the device; a site of which samples were not the same."""
        with self._lock:
            while self._noted:
                self._asked.append(_ask(*self._noted.popitem()))
            return self._read(is_end=True)

    def _read(self, *, is_end: bool) -> SaveSite | None:
        while self._asked and (is_end or self._asked[0].answered.query()):
            question = self._asked.pop(0)
            question.answered.synchronize()
            for site, is_apart in zip(question.sites, question.are_apart.tolist(), strict=True):
                if is_apart:
                    return site
        return None


def _ask(key: Key, pairs: list[_Pair]) -> _Question:
    stream, tolerance = key
    with torch.cuda.stream(stream):  # the samples were taken on it
        first, second = torch.stack([pair.first for pair in pairs]), torch.stack([pair.second for pair in pairs])
        read = _allocate(len(pairs))
        read.copy_(are_apart(first, second, tolerance), non_blocking=True)
        return _Question(stream.record_event(), read, [pair.site for pair in pairs])


def _allocate(count: int) -> Tensor:
    """Allocate memory that a device copies to while the program goes on."""
    return torch.empty(count, dtype=torch.bool, pin_memory=True)


def make_error(site: SaveSite, what: str) -> RecomputeError:
    """Make the error for a second run that was not like the first."""
    return RecomputeError(
        f"{site} was run again for its gradient and did not compute the same: {what}.",
        repair="make its forward a function of its arguments, parameters, buffers that it does not write to, and the"
        " generators of torch, Python and NumPy; or keep this module by another policy than Recompute.",
        reason="the gradient would be that of another forward. A counter, the time, a file, or a generator of the"
        " module's own is not put back.",
    )


@dataclass(slots=True)
class RecomputeGuard:
    """A forward of a module, which is to run a second time.

    Attributes:
        site: the module.
        find_site: says where this thread is in the model.
        stays: whether a tensor is a parameter or a buffer: running statistics go on, and the second run sees others.
        late: compares what is on a device.
        drawing: what it draws.
    """

    site: SaveSite
    find_site: Callable[[], SaveSite]
    stays: Stays
    late: LateComparison
    drawing: DrawnNumbers = field(default_factory=DrawnNumbers)

    def end_first(self) -> None:
        """Record the end of the first run."""
        self.drawing.end()

    def second_run(self) -> AbstractContextManager[None]:
        """Draw the same numbers inside of it."""
        return self.drawing.again()

    def take_sample(self, tensor: Tensor) -> Sample | None:
        """Sample a tensor that is saved; None where other values do no harm."""
        if self.stays(tensor, tensor.untyped_storage()) or self.find_site().kind in FILLED_LATE:
            return None
        return take_sample(tensor)

    def compare(self, sample: Sample, tensor: Tensor) -> None:
        """Compare a sample with a tensor of the second run; on a device later, so that nobody waits for it."""
        again = take_sample(tensor) if is_plain(tensor) else None
        other: SaveSite | None = None
        if isinstance(sample, Tensor) and isinstance(again, Tensor):
            other = self.late.note(sample, again, tensor.dtype, self.site)
        elif isinstance(sample, list) and isinstance(again, list):
            other = self.site if numbers_are_apart(sample, again, tolerance_of(tensor.dtype)) else None
        if other is not None:
            raise make_error(other, "a saved tensor has other values than in the forward")

    def refuse_run(self, error: Exception) -> NoReturn:
        """Raise: the second run saved other tensors, or fewer, or more."""
        first = str(error).strip().split("\n", 1)[0].removeprefix("torch.utils.checkpoint: ").rstrip(".:")
        raise make_error(self.site, f"{first[:1].lower()}{first[1:]}") from error

    def refuse_saved(self, size: torch.Size, dtype: torch.dtype, versions: tuple[int, int], storage: int) -> NoReturn:
        """Raise: a saved tensor was written to."""
        refuse_overwritten(size, dtype, versions, self.site, storage)

    def refuse_parameter(self, name: str, versions: tuple[int, int]) -> NoReturn:
        """Raise: a parameter was written to."""
        raise OverwrittenError(
            f"The parameter {name!r} was written to in place before {self.site} ran its forward again: it was at"
            f" version {versions[0]} and is at version {versions[1]}.",
            repair="update parameters after the backward pass, or keep this module by another policy than Recompute.",
            reason="the gradient would be that of other values than the loss.",
        )


class Recompute(Policy):
    """Drop what a module saves; the backward pass runs its forward again, with the same random numbers.

    Give it to the modules to run again: ``{"blocks.*": Recompute()}`` recomputes each block by itself. It holds the
    module's inputs, costs one more forward, and is exact as long as the forward is the same again; buffers are put
    back afterwards, so that running statistics count each batch once. It is done by torch's own non-reentrant
    checkpoint, which knows about autocast, random states, retained graphs and double backward, and stops as soon as it
    has what is needed; hooks around the module's call take the place of the changed line.

    The random numbers are those of torch, of ``random`` and of ``numpy.random``. Of each tensor that is saved sixteen
    elements are kept and compared: a forward that is not the same again raises
    :class:`~retrograd.core.errors.RecomputeError` where the gradient would use it; on a CUDA device some time later, or
    when :func:`~retrograd.memory.saved.keeping.keep_saved` ends, since nothing waits for the device.
    """

    def __init__(self) -> None:
        self._late = LateComparison()

    @property
    def late(self) -> LateComparison:
        """Samples that have still to be compared."""
        return self._late

    def pack(self, saved: Saved) -> Packed | None:
        """Never asked: a module is run again, not a tensor."""
        return None

    def close(self) -> None:
        """Wait for what has still to be compared.

        Raises:
            RecomputeError: a module was not the same again.
        """
        site = self._late.end()
        if site is not None:
            raise make_error(site, "a saved tensor had other values than in the forward")
