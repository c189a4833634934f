"""Rules on the gradients of parameters: what each backward pass finds, before it is added to ``.grad``."""

from __future__ import annotations

from torch import Tensor, nn

from retrograd.errors import CannotRewriteError
from retrograd.hooks.engine import uncompiled
from retrograd.hooks.sharding import is_flattened, is_sharded
from retrograd.hooks.tensor import change_gradient, leave_gradient, shares_memory
from retrograd.rewriting.beside import Beside, Noted
from retrograd.rewriting.chain import Chain
from retrograd.rewriting.place import Host


class ParameterRewriter:
    """Lets rules act on the gradient of one parameter.

    Args:
        host: the rewriting.
        module: the module that has the parameter.
        name: what the module calls it.
        parameter: the parameter.
        chain: the rules.

    Raises:
        CannotRewriteError: for a parameter whose hooks torch does not call.
    """

    __slots__ = ("_chain", "_host", "_is_attached", "_module", "_name", "_parameter")

    def __init__(self, host: Host, module: nn.Module, name: str, parameter: Tensor, chain: Chain) -> None:
        self._host = host
        self._module = module
        self._name = name
        self._parameter = parameter
        self._chain = chain
        self._is_attached = False
        self.attach()

    def attach(self) -> None:
        """Set the hook, once the parameter trains; on another one, if that has taken its place in the module."""
        own = dict(self._module._parameters.items())  # a scripted module has no dict, but something like it
        parameter = own.get(self._name)
        if parameter is not None and parameter is not self._parameter:
            self.remove()
            self._parameter = parameter
        if self._is_attached or not self._parameter.requires_grad:
            return
        if is_sharded(self._parameter) or is_flattened(self._parameter):
            raise CannotRewriteError(
                f"The gradient of {self._chain.name} cannot be rewritten: the parameter is sharded.",
                repair="set the rule on the gradient of the module's output.",
                reason="torch calls no hook of a sharded parameter.",
            )
        change_gradient(self._parameter, self.change)
        self._is_attached = True

    @uncompiled
    def change(self, gradient: Tensor | None) -> Tensor | None:
        """The hook: what is added to ``.grad`` instead."""
        if gradient is None or not self._host.is_active:
            return None
        chain, scale, training = self._chain, self._host.clock.scale, self._module.training
        beside = Beside(Noted(self._parameter), {}) if chain.needs_value else None
        if scale is not None:
            return chain.change_scaled(gradient, scale, 1, training, beside)
        changed = chain.change(gradient, 1, training, beside)
        if shares_memory(changed):  # it may become ``.grad``, which is written into
            return changed.clone()
        return None if changed is gradient else changed

    change.__torch_unserializable__ = True  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Take the hook back."""
        leave_gradient(self._parameter, self.change)
        self._is_attached = False
