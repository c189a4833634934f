"""The state of the random generators of a process: what we do leaves all of them as they were.

Loads without torch and NumPy, and asks only for generators that the process has by now.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Randomness:
    """The states as they are now, of Python, NumPy and torch (CPU and CUDA); ``restore()`` puts them back.

    Other threads must not draw in between: what they have drawn would be drawn again.
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = getattr(sys.modules.get("numpy"), "random", None)
        self._numpy_state = None if self._numpy is None else self._numpy.get_state(legacy=False)
        self._torch = [(generator, generator.get_state()) for generator in _list_torch_generators()]

    def restore(self) -> None:
        """Put all of them back."""
        for generator, state in self._torch:
            generator.set_state(state)
        if self._numpy is not None:
            self._numpy.set_state(self._numpy_state)
        random.setstate(self._python)


def seed_generators(seed: int) -> None:
    """Seed all generators that the process has by now."""
    random.seed(seed)
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    torch: Any = sys.modules.get("torch")
    if numpy is not None:
        numpy.seed(seed)
    if hasattr(torch, "default_generator"):
        torch.manual_seed(seed)


@contextmanager
def random_kept() -> Iterator[None]:
    """Whatever is drawn inside of it, all random generators are as before at its end."""
    randomness = Randomness()
    try:
        yield
    finally:
        randomness.restore()


def _list_torch_generators() -> list[Any]:
    """The default generators of torch; a device that is not in use, or captures a graph, is not asked."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "default_generator"):  # not loaded, or just being loaded
        return []
    cuda = torch.cuda
    in_use = cuda.is_initialized() and not cuda.is_current_stream_capturing()
    return [torch.default_generator, *(cuda.default_generators if in_use else ())]
