"""Random numbers that a forward draws from Python's and NumPy's generators, drawn again when it is recomputed.

Torch's own checkpoint puts back torch's. Generators that a module holds itself cannot all be found.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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
    """The functions of ``random``."""

    def __init__(self) -> None:
        self._last = NOT_LOADED

    def read(self) -> GeneratorState:
        """Takes 20 µs. A state has 20 kB, and is the same for many calls."""
        values, last = random.getstate(), self._last
        if values != last.key:
            last = self._last = GeneratorState(values, values)
        return last

    def write(self, state: GeneratorState) -> None:
        """Draw from here."""
        random.setstate(state.values)


class _Numpy:
    """The functions of ``numpy.random``, as soon as the program has loaded it."""

    def __init__(self) -> None:
        self._last = NOT_LOADED

    def read(self) -> GeneratorState:
        """Takes 3 µs; 80 µs if something was drawn since.

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
        """The forward is over."""
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
