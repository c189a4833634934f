"""Remembers numbers, averages, windows and tensors from call to call, by name."""

from __future__ import annotations

from retrograd.rewriting.memory.averages import Ema, Mean
from retrograd.rewriting.memory.store import Store
from retrograd.rewriting.memory.window import LastTensors, Window


class Memory(Store):
    """Keeps what a rule or a Function remembers between calls.

        memory.put("seen", memory.get("seen", 0) + 1)      a number or a tensor as it is
        memory.mean("norm").add(gradient.norm())           then memory.mean("norm").value, .count
        memory.ema("norm", 0.9).add(gradient.norm())       exponential moving average
        memory.window("norm", 128).add(gradient.norm())    then .quantile(0.9), .mean, .std
        memory.last("gradient", 8).add(gradient)           then memory.last("gradient", 8)[-1]

    Averages and windows work on the device of what they are given and never wait for it. What comes is detached; no
    graph is held. What is NaN or infinite does not enter. They count in float32, or in float64 where that comes; an
    average that nothing has entered is NaN.

    Names belong to their kind: the mean and the average of ``"norm"`` do not meet. After ``load_state_dict`` a tensor
    goes to the device of the first one that is added to it.

    A memory can be copied and pickled. Two threads that use one at the same time need a lock around it.
    """

    def mean(self, name: str) -> Mean:
        """The mean of all that was added under this name."""
        return Mean(self, name)

    def ema(self, name: str, decay: float) -> Ema:
        """The exponential moving average of what was added under this name.

        Args:
            name: any text.
            decay: what the past weighs at each number that comes: from 0 to below 1.
        """
        return Ema(self, name, decay)

    def window(self, name: str, size: int | None) -> Window:
        """The last ``size`` numbers that were added under this name; all of them when it is None."""
        return Window(self, name, size)

    def last(self, name: str, size: int) -> LastTensors:
        """The last ``size`` tensors that were added under this name, oldest first."""
        return LastTensors(self, name, size)
