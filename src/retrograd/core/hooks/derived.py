"""What is computed of some tensors by operations that have a derivative, in one thread, for a while."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from torch import Tensor

from retrograd.core.hooks.engine import uncompiled
from retrograd.core.hooks.function_mode import ForwardListener
from retrograd.core.hooks.torch_calls import TorchCall, called_name, is_bare

_CUTTING = frozenset(
    {"detach", "detach_", "data", "round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "heaviside", "bernoulli"}
    | {"poisson", "normal"}
)
"""Functions of whose result no derivative comes back, though it is a number with a fraction."""


def may_differentiate(name: str) -> bool:
    """Return whether a derivative comes back through a torch function of this name."""
    return name not in _CUTTING and not is_bare(name)


class DerivedTensors(ForwardListener):
    """Finds what is computed of some tensors while it is entered. What compiled code computes is not seen.

    Args:
        sources: the tensors.
    """

    def __init__(self, sources: Iterable[Tensor]) -> None:
        super().__init__()
        self._derived = {id(each): each for each in sources}  # held, so that no other tensor gets their identity

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of them, or computed of them."""
        return id(tensor) in self._derived

    @uncompiled
    def before(self, call: TorchCall) -> tuple[()] | None:
        """Request its result if a derivative may go through."""
        is_through = may_differentiate(called_name(call.function)) and any(map(self.holds, call.operands))
        return () if is_through else None

    @uncompiled
    def after(self, call: TorchCall, seen: tuple[()]) -> None:
        """Hold what was made."""
        self._derived |= {id(each): each for each in call.made if each.is_floating_point() or each.is_complex()}

    def fail(self, error: Exception) -> None:
        """Know nothing."""
        self._derived = {}
