"""Rules on the gradients of parameters: what each backward pass finds, before it is added to ``.grad``."""

from __future__ import annotations

import weakref

from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from retrograd.errors import CannotRewriteError
from retrograd.hooks.distributed import is_flattened, is_sharded
from retrograd.hooks.engine import uncompiled
from retrograd.hooks.gradients import change_gradient, leave_gradient, shares_memory
from retrograd.rewriting.chain import Beside, Noted, RuleChain
from retrograd.rewriting.site_rewriter import RewriterFactory


class ParameterRewriter:
    """Lets rules act on the gradient of one parameter.

    Args:
        factory: has the clock, and says whether rules act.
        module: the module that has the parameter; neither of them is held.
        name: what the module calls it.
        parameter: the parameter.
        chain: the rules.

    Raises:
        CannotRewriteError: for a parameter whose hooks torch does not call.
    """

    __slots__ = ("_chain", "_factory", "_find", "_find_module", "_is_attached", "_name")

    def __init__(
        self, factory: RewriterFactory, module: nn.Module, name: str, parameter: Tensor, chain: RuleChain
    ) -> None:
        self._factory = factory
        self._find_module = weakref.ref(module)
        self._name = name
        self._find = WeakIdRef(parameter)
        self._chain = chain
        self._is_attached = False
        self.attach()

    def attach(self) -> None:
        """Set the hook, once the parameter trains; on another one, if that has taken its place in the module."""
        module, parameter = self._find_module(), self._find()
        if module is None:
            return
        own = dict(module._parameters.items()).get(self._name)  # a scripted module has no dict, but something like it
        if own is not None and own is not parameter:
            self.remove()
            parameter = own
            self._find = WeakIdRef(own)
        if self._is_attached or parameter is None or not parameter.requires_grad:
            return
        if is_sharded(parameter) or is_flattened(parameter):
            raise CannotRewriteError(
                f"The gradient of {self._chain.name} cannot be rewritten: the parameter is sharded.",
                repair="set the rule on the gradient of the module's output.",
                reason="torch calls no hook of a sharded parameter.",
            )
        change_gradient(parameter, self.change)
        self._is_attached = True

    @uncompiled
    def change(self, gradient: Tensor | None) -> Tensor | None:
        """The hook: what is added to ``.grad`` instead."""
        if gradient is None or not self._factory.is_active:
            return None
        chain, scale, module, parameter = self._chain, self._factory.clock.scale, self._find_module(), self._find()
        training = module is None or module.training
        beside = Beside(Noted(parameter), {}) if chain.needs_value and parameter is not None else None
        if scale is not None:
            return chain.change_scaled(gradient, scale, 1, training, beside)
        changed = chain.change(gradient, 1, training, beside)
        if shares_memory(changed):  # it may become ``.grad``, which is written into
            return changed.clone()
        return None if changed is gradient else changed

    change.__torch_unserializable__ = True  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Take the hook back."""
        parameter = self._find()
        if parameter is not None:
            leave_gradient(parameter, self.change)
        self._is_attached = False
