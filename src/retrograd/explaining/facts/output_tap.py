"""What modules return at a look, in eager code and in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from retrograd.core.hooks.engine import is_in_backward, is_tracing, without_functions
from retrograd.core.hooks.nested import Keys, flatten


@dataclass(slots=True)
class Switch:
    """Says whether taps are asked."""

    awake: bool = False


class OutputTap:
    """Observes the calls of one module while its switch is on.

    Args:
        switch: turns it on.
        see: is shown the tensors that a call returns, each with its keys.
    """

    def __init__(self, switch: Switch, see: Callable[[Sequence[tuple[Keys, Tensor]]], None]) -> None:
        self.switch = switch
        self._see = see

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The forward hook."""
        if not is_in_backward() and not is_tracing():
            with without_functions():
                self._see(list(flatten(output, ())))

    def after_compiled_call(self, rest: Sequence[tuple[Keys, Tensor]]) -> None:
        """Do nothing more: the rest of what compiled code has shown."""

    def see_in_compiled_code(self, tensors: Sequence[tuple[Keys, Tensor]], trains: bool) -> tuple[()]:
        """Receive what a call inside compiled code returns."""
        if not is_in_backward():
            self._see(tensors)
        return ()
