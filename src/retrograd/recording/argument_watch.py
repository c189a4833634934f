"""What a module is called with: each argument by its name, and its gradient through this module alone."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from retrograd.hooks.arguments import argument_names
from retrograd.hooks.engine import grad_enabled, next_sequence_number
from retrograd.hooks.input_gradient import InputGradient, edge_of, hook_input_gradients
from retrograd.hooks.nested import flatten
from retrograd.hooks.nodes import is_leaf
from retrograd.recording.module_watch import PlaceMaker, SlotWatch
from retrograd.recording.site_recorder import SiteRecorder
from retrograd.sites.site import Site


class ArgumentHost(PlaceMaker, Protocol):
    """A recorder that finishes input gradients when a pass has ended."""

    input_gradients: list[InputGradient]


class ArgumentWatch(SlotWatch):
    """Records the arguments of a module's calls."""

    __slots__ = ("_names", "_open", "_pending", "_rest")

    def __init__(self, host: ArgumentHost, module: nn.Module, path: str) -> None:
        super().__init__(host, module, path, ("input",))
        self._names, self._rest = argument_names(module)
        self._pending: list[InputGradient] = []
        self._open: list[tuple[int, list[InputGradient]]] = []

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre-hook: values are read before the module can overwrite them."""
        self._pending = []
        if self.switch.awake:
            try:
                self.see(self._bind(args, kwargs))
            except Exception as error:
                self._host.fault(Site(self.path, self._keys), error)
        self._open.append((next_sequence_number(), self._pending))

    def after_call(self, module: nn.Module, output: Any) -> None:
        """The forward hook, called also when the module raised, or when a hook before ours did."""
        if not self._open:
            return
        first_number, gradients = self._open.pop()
        try:
            if gradients and output is not None:
                outputs = [tensor for _, tensor in flatten(output, ()) if tensor.requires_grad]
                hook_input_gradients(gradients, outputs, first_number, self._host.guard, self._host.leaf_handles)
                self._host.input_gradients.extend(gradients)  # type: ignore[attr-defined]
        except Exception as error:
            self._host.fault(Site(self.path, self._keys, quantity="grad"), error)
        finally:
            gradients.clear()  # each holds the graph until its hooks are set

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = dict(zip(self._names, args, strict=False))
        if len(args) > len(self._names):
            bound[self._rest] = args[len(self._names) :]
        return {**bound, **kwargs}

    def _visit(self, recorder: SiteRecorder, tensor: torch.Tensor) -> bool:
        recorder.record(tensor)
        if not (recorder.wants_gradient and tensor.requires_grad and grad_enabled()):
            return not recorder.wants_gradient
        self._watch(recorder, tensor)
        return True

    def _watch(self, recorder: SiteRecorder, tensor: torch.Tensor) -> None:
        found = edge_of(tensor)
        if found is not None:
            edge, number = found
            if is_leaf(edge.node) and recorder.gradient is not None:
                recorder.gradient.copy_from_now_on()
            self._pending.append(InputGradient(recorder.see_gradient, edge, number))
