"""Rules on parameters: on the gradient that each pass finds, before it is added to ``.grad``, and on their values.

While a module is called, an attribute of it stands for a parameter whose value has rules: it is found before the
parameter of that name, which stays where it is. All threads see it, so such a module is called by one thread at a time.
Several rewritings may each put something there; whoever comes later has what those before it have made, and they leave
in any order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from retrograd.core.errors import CannotRewriteError
from retrograd.core.hooks.engine import uncompiled
from retrograd.core.hooks.gradients import change_gradient, leave_gradient, shares_memory
from retrograd.core.hooks.names import parameter_site
from retrograd.core.identities import IdentityDict
from retrograd.core.ranks.placements import is_flattened
from retrograd.core.ranks.sharded_gradient import ShardedGradient, ShardedParameters, is_managed
from retrograd.rewriting.chain import Beside, Noted, RuleChain
from retrograd.rewriting.module_rewriter import CallInProgress, InputRewriter
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

    __slots__ = ("_chain", "_factory", "_find", "_find_module", "_is_attached", "_name", "_sharded")

    def __init__(
        self, factory: RewriterFactory, module: nn.Module, name: str, parameter: Tensor, chain: RuleChain
    ) -> None:
        self._factory = factory
        self._find_module = weakref.ref(module)
        self._name = name
        self._find = WeakIdRef(parameter)
        self._chain = chain
        self._is_attached = False
        self._sharded: ShardedGradient | None = None
        self.attach()

    @property
    def may_be_sharded(self) -> bool:
        """Whether FSDP may shard it by now."""
        module = self._find_module()
        return module is not None and is_managed(module)

    def attach(self, sharded: ShardedParameters | None = None) -> None:
        """Set the hook, once the parameter trains; on another one, if that has taken its place in the module.

        Args:
            sharded: what FSDP2 shards by now, if anything.
        """
        module, parameter = self._find_module(), self._find()
        if module is None:
            return
        own = dict(module._parameters.items()).get(self._name)  # a scripted module has no dict, but something like it
        if is_managed(module) and self._is_sharded(module, own, sharded or ShardedParameters()):
            return
        if own is not None and own is not parameter:
            self.remove()
            parameter = own
            self._find = WeakIdRef(own)
        if parameter is not None and is_flattened(parameter):  # it may have been so since its hook was set
            raise self._refuse_flattened()
        if self._is_attached or parameter is None or not parameter.requires_grad:
            return
        change_gradient(parameter, self.change)
        self._is_attached = True

    def _is_sharded(self, module: nn.Module, own: Tensor | None, sharded: ShardedParameters) -> bool:
        if self._sharded is not None and self._sharded.is_aside:  # of a pass that runs
            return True
        self._sharded = sharded.find(module, self._name)
        if self._sharded is None:
            if own is None:  # the older FSDP has taken it
                raise self._refuse_flattened()
            return False  # it is left out of the sharding
        self.remove()
        self._find = WeakIdRef(self._sharded.parameter)
        return True

    def _refuse_flattened(self) -> CannotRewriteError:
        return CannotRewriteError(
            f"The gradient of {self._chain.name} cannot be rewritten: FullyShardedDataParallel has flattened it.",
            repair="shard the model by torch.distributed.fsdp.fully_shard, or set the rule on the gradient of the "
            "module's output.",
            reason="each process has a stretch of several parameters in one, and torch calls no hook of them.",
        )

    def pass_begins(self) -> None:
        """Empty the ``.grad`` of a sharded parameter, so that what the pass brings can be told.

        Raises:
            CannotRewriteError: for a pass of which that cannot be told.
        """
        sharded = self._sharded
        if sharded is None or not self._is_trained(sharded):
            return
        check_pass(sharded, self._chain.name)
        sharded.put_aside()

    @staticmethod
    def _is_trained(sharded: ShardedGradient) -> bool:
        return sharded.parameter is not None and sharded.parameter.requires_grad

    def pass_ends(self, failed: bool) -> None:
        """Let the rules act on what the pass has brought to a sharded parameter, unless it has failed."""
        sharded = self._sharded
        if sharded is None:
            return
        changed = None
        try:
            with torch.no_grad():
                changed = None if failed else self.change(sharded.read())
        finally:
            sharded.put_back(changed)

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

    def let_go(self) -> None:
        """Take the hook back for good, maybe within a pass."""
        self.remove()
        if self._sharded is not None:
            self._sharded.put_back()


def check_pass(sharded: ShardedGradient, name: str) -> None:
    """Make sure that what a pass brings to a sharded parameter can be told when it is over.

    Raises:
        CannotRewriteError: if that is not so.
    """
    if sharded.is_postponed:
        raise CannotRewriteError(
            f"{name} cannot be rewritten in this pass, for it is not reduced by itself.",
            repair="reduce in each pass, model.set_requires_gradient_sync(True), or give the optimizer a rule of the "
            "norm: rg.rewrite(optimizer, rg.rules.ClipNorm(1.0)).",
            reason="a rule acts on what one pass brings, and of several that are reduced together that is not known.",
        )
    if sharded.is_used_early:
        raise CannotRewriteError(
            f"{name} cannot be rewritten: a hook of the parameter uses it before the pass is over.",
            repair="let the optimizer step after the pass, and take back the hooks that were set by "
            "`register_post_accumulate_grad_hook`.",
            reason="a rule on a gradient that FSDP2 shards acts when the pass is over.",
        )


_lock = threading.Lock()


class ParameterOverrides:
    """Puts values in the place of the parameters of one module; the same object for all that rewrite it."""

    def __init__(self) -> None:
        self._alone = threading.RLock()
        self._layers: dict[str, list[tuple[object, Any]]] = {}

    def enter(self) -> None:
        """Begin a call once no other thread is in one."""
        self._alone.acquire()

    def find(self, module: nn.Module, name: str) -> Any:
        """The value in the place of a parameter now; None where the parameter itself is used."""
        return vars(module).get(name)

    def put(self, module: nn.Module, name: str, call: object, value: Any) -> None:
        """Let ``value`` stand for a parameter until this call ends."""
        attributes = vars(module)
        if name not in self._layers:
            self._layers[name] = [(None, attributes[name])] if name in attributes else []
        self._layers[name].append((call, value))
        attributes[name] = value

    def leave(self, module: nn.Module, call: object) -> None:
        """End a call, and take back what it has put there."""
        attributes = vars(module)
        for name, layers in list(self._layers.items()):
            layers[:] = [layer for layer in layers if layer[0] is not call]
            if layers:
                attributes[name] = layers[-1][1]
            else:
                attributes.pop(name, None)
            if all(owner is None for owner, _ in layers):
                del self._layers[name]
        self._alone.release()


_overrides: IdentityDict[nn.Module, ParameterOverrides] = IdentityDict()


def overrides_of(module: nn.Module) -> ParameterOverrides:
    """The overrides of this module."""
    with _lock:
        return _overrides.setdefault(module, ParameterOverrides())


class ParameterValueRewriter(InputRewriter):
    """Lets rules act on the values of a module's parameters, as its calls find them.

    Args:
        factory: makes the rewriters, and has the clock.
        module: the module.
        path: its path.
        parameters: names of its parameters whose values have rules.
    """

    def __init__(self, factory: RewriterFactory, module: nn.Module, path: str, parameters: Sequence[str]) -> None:
        super().__init__(factory, module, path)
        self._parameters = tuple(parameters)
        self._overrides = overrides_of(module)

    def _change(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], running: CallInProgress
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._overrides.enter()
        running.has_overrides = True
        for name in self._parameters:
            self._put_parameter(module, name, running)
        return args, kwargs

    def _leave(self, module: nn.Module, running: CallInProgress) -> None:
        if running.has_overrides:
            running.has_overrides = False
            self._overrides.leave(module, running)

    def _put_parameter(self, module: nn.Module, name: str, running: CallInProgress) -> None:
        rewriter = self.rewriters.find(
            parameter_site(self._path, name).keys, running.call.number if running.call is not None else 1
        )
        if rewriter is None:
            return
        if name not in module._parameters:
            raise CannotRewriteError(
                f"{rewriter.name} is no longer a parameter, so that its value cannot be rewritten.",
                repair="set the rules after parametrizing or pruning the module.",
            )
        parameter = module._parameters[name]
        if parameter is None:
            return
        earlier = self._overrides.find(module, name)  # of another rewriting, or of a call around this one
        is_recursive = len(self._here.running) > 1
        value = parameter if earlier is None or is_recursive else earlier
        changed = rewriter.change_value(value, running.call, module.training, again=running.again)
        if changed is not value:
            self._overrides.put(module, name, running, changed)
