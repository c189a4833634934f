"""Rules on the gradients of parameters: what each backward pass finds, before it is added to ``.grad``."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from retrograd.errors import CannotRewriteError
from retrograd.hooks.engine import uncompiled
from retrograd.hooks.tensor import change_gradient
from retrograd.rewriting.chain import Chain, GradientChain
from retrograd.rewriting.place import Host


class ParameterRewriter:
    """Lets rules act on the gradient of one parameter.

    Args:
        host: the rewriting.
        module: the module that has the parameter.
        parameter: the parameter.
        chain: the rules.

    Raises:
        CannotRewriteError: for a parameter whose hooks torch does not call.
    """

    __slots__ = ("_chain", "_gradient", "_host", "_module", "_parameter", "_undo")

    def __init__(self, host: Host, module: nn.Module, parameter: Tensor, chain: Chain) -> None:
        if type(parameter.data).__name__ == "DTensor":
            raise CannotRewriteError(
                f"The gradient of {chain.name} cannot be rewritten: the parameter is sharded.",
                repair="set the rule on the gradient of the module's output, or on the optimizer.",
                reason="torch calls no hook of a sharded parameter.",
            )
        self._host = host
        self._module = module
        self._parameter = parameter
        self._chain = chain
        self._gradient = GradientChain(chain, host.clock)
        self._undo: Callable[[], None] | None = None
        self.attach()

    def attach(self) -> bool:
        """Set the hook, unless the parameter is frozen; returns whether it is set."""
        if self._undo is None and self._parameter.requires_grad:
            self._undo = change_gradient(self._parameter, self.change)
        return self._undo is not None

    @uncompiled
    def change(self, gradient: Tensor | None) -> Tensor | None:
        """The hook: what is added to ``.grad`` instead."""
        if gradient is None or not self._host.is_active:
            return None
        activation = self._parameter.detach() if self._gradient.needs_value else None
        changed = self._gradient.change(gradient, 1, self._module.training, activation)
        flows = gradient if changed is None else changed
        if self._chain.holds(flows):  # it may become ``.grad``, to which the next pass is added
            return flows.clone()
        return changed

    change.__torch_unserializable__ = True  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Take the hook back."""
        if self._undo is not None:
            self._undo()
            self._undo = None
