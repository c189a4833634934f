"""The state of all random generators that a module may draw from."""

from __future__ import annotations

import random

import numpy as np
import torch


class Randomness:
    """The states as they are now, of torch (CPU and CUDA), NumPy and Python; ``restore()`` puts them back."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._numpy = np.random.get_state()  # noqa: NPY002  # the one that a module's code would use
        self._python = random.getstate()

    def restore(self) -> None:
        """Put all of them back."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._python)
