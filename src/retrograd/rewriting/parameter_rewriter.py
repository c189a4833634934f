"""Rules on the gradients of parameters: what each backward pass finds, before it is added to ``.grad``."""

from __future__ import annotations

from torch import Tensor, nn

from retrograd.errors import CannotRewriteError
from retrograd.hooks.engine import uncompiled
from retrograd.hooks.tensor import change_gradient, leave_gradient
from retrograd.rewriting.chain import Chain
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

    __slots__ = ("_chain", "_host", "_is_attached", "_module", "_parameter")

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
        self._is_attached = False
        self.attach()

    def attach(self) -> bool:
        """Set the hook, unless the parameter is frozen; returns whether it is set."""
        if not self._is_attached and self._parameter.requires_grad:
            change_gradient(self._parameter, self.change)
            self._is_attached = True
        return self._is_attached

    @uncompiled
    def change(self, gradient: Tensor | None) -> Tensor | None:
        """The hook: what is added to ``.grad`` instead."""
        if gradient is None or not self._host.is_active:
            return None
        chain, scale, training = self._chain, self._host.clock.scale, self._module.training
        activation = self._parameter.detach() if chain.needs_value else None
        if scale is not None:
            return chain.change_scaled(gradient, scale, 1, training, activation)
        changed = chain.change(gradient, 1, training, activation)
        if chain.holds(changed):  # it may become ``.grad``, to which the next pass is added
            return changed.clone()
        return None if changed is gradient else changed

    change.__torch_unserializable__ = True  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Take the hook back."""
        leave_gradient(self._parameter, self.change)
