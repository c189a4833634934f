"""Dropout that works in a forward in eval mode: a function that is called without ``training=self.training``."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

from retrograd.core.frames import read_locals
from retrograd.core.history.facts import ActiveDropout
from retrograd.core.hooks.calls import MODULE_CALLS
from retrograd.core.hooks.dispatch import is_in_compiled_call
from retrograd.core.hooks.engine import grad_enabled, is_tracing, uncompiled
from retrograd.core.hooks.function_mode import ForwardListener
from retrograd.core.hooks.torch_calls import TorchCall, is_inner
from retrograd.core.identities import IdentityDict
from retrograd.core.recording.fact_source import FactHost, FactSource

_MOST = 2
"""Forwards of a model in eval mode that are listened to."""

_SWITCHED = frozenset({"dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"})
"""Functions of an input, p and ``training``."""

_ATTENTION = "scaled_dot_product_attention"


class DropoutSource(FactSource):
    """Listens to the first forwards of each model in eval mode without grad, after training has begun."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._seen: IdentityDict[nn.Module, int] = IdentityDict()
        self._lines: set[str] = set()
        self._listener = _Listener(self._note, lambda error: host.fault("dropout in eval mode", error))

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """A recorded model is called."""
        if model.training or grad_enabled() or self._listener.is_started:
            return
        seen = self._seen.get(model, 0)
        if seen < _MOST and self.host.step and not is_in_compiled_call():
            self._seen[model] = seen + 1
            self._listener.start()

    def forward_ends(self, model: nn.Module, output: Any, failed: bool) -> None:
        """A forward has ended."""
        self._stop()

    def end(self) -> None:
        """Recording ends."""
        self._stop()
        self._seen.clear()

    def _stop(self) -> None:
        if self._listener.is_started:
            self._listener.stop()

    def _note(self, call: TorchCall, probability: float) -> None:
        if call.line in self._lines:
            return
        self._lines.add(call.line)
        name = self.host.models.path_of(module) if (module := _find_module(call.frame)) is not None else None
        self.host.note_fact(ActiveDropout(name=name or "", value=probability, operation=call.name, line=call.line))


class _Listener(ForwardListener):
    """Reports calls of dropout by the program itself that drop."""

    def __init__(self, note: Callable[[TorchCall, float], None], fault: Callable[[Exception], None]) -> None:
        super().__init__()
        self._note = note
        self._fault = fault

    @uncompiled
    def before(self, call: TorchCall) -> None:
        """A function is about to be called."""
        if not is_inner[call.frame.f_code.co_filename] and not is_tracing():
            probability = _find_probability(call)
            if probability > 0 and not _is_meant(call.frame):
                self._note(call, probability)

    def fail(self, error: Exception) -> None:
        """Listen no more."""
        self._fault(error)


def _find_probability(call: TorchCall) -> float:
    """The share that a call drops; 0 for anything else."""
    if call.name == _ATTENTION:
        return float(_argument(call, "dropout_p", 4, 0.0))
    if call.name not in _SWITCHED or not _argument(call, "training", 2, True):
        return 0.0
    return float(_argument(call, "p", 1, 0.5))


def _argument(call: TorchCall, name: str, place: int, default: Any) -> Any:
    return call.kwargs.get(name, call.args[place] if len(call.args) > place else default)


def _is_meant(frame: FrameType) -> bool:
    """Check whether the line itself says ``training=True``, as for Monte-Carlo dropout."""
    return "True" in linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)


def _find_module(frame: FrameType | None) -> nn.Module | None:
    """The module in whose call a frame is."""
    while frame is not None and frame.f_code not in MODULE_CALLS:
        frame = frame.f_back
    found = None if frame is None else read_locals(frame)[frame.f_code.co_varnames[0]]
    return found if isinstance(found, nn.Module) else None
