"""Modules that are in training mode, and dropout that works in eval mode."""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

from retrograd.core.frames import read_locals
from retrograd.core.history.facts import ActiveDropout, Modes
from retrograd.core.hooks.calls import MODULE_CALLS
from retrograd.core.hooks.dispatch import is_in_compiled_call
from retrograd.core.hooks.engine import grad_enabled, is_tracing, uncompiled
from retrograd.core.hooks.function_mode import ForwardListener
from retrograd.core.hooks.names import walk_paths
from retrograd.core.hooks.torch_calls import TorchCall, is_inner
from retrograd.core.identities import IdentityDict
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.core.sites.site import ROOT

_AT_ONCE = 8
"""Modules that are asked at each forward; the root is always."""
_MOST = 100
"""Changes that are noted, whatever they are; then those to what was not there before."""


class ModeSource(FactSource):
    """Records the modes of a model when they are not as at the forward before.

    A change of the root's is seen at once; one deep inside a large model at the latest when its turn to be asked has
    come, or at the next look.
    """

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._known: IdentityDict[nn.Module, _Known] = IdentityDict()

    def model_added(self, name: str, model: nn.Module) -> None:
        """A model is recorded from now on."""
        self._known.pop(model, None)

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """A recorded model is called."""
        name = self.host.models.name_of(model)
        called = self.host.models if name is None else [(name, model)]  # all where a part is called by itself
        for each_name, each in called:
            self._ask(each_name, each)

    def _ask(self, name: str, model: nn.Module) -> None:
        known = self._known.get(model)
        if known is None:
            known = self._known[model] = _Known()
        if known.root != model.training or known.have_some_changed() or self.host.is_look:
            flags = known.look(name, model)
            if flags is not None:
                training, evaluating = _summarize(flags)
                self.host.note_fact(Modes(name=name or ROOT, training=training, evaluating=evaluating))


class _Known:
    """The modes of a model at the forward before."""

    def __init__(self) -> None:
        self.root: bool | None = None
        self._flags: dict[str, bool] = {}
        self._modules: list[tuple[weakref.ref[nn.Module], bool]] = []
        self._place = 0
        self._seen: set[int] = set()
        self._changes = 0

    def have_some_changed(self) -> bool:
        """Check a few modules, others at each forward."""
        place = self._place
        some = self._modules[place : place + _AT_ONCE]
        self._place = place + _AT_ONCE if place + _AT_ONCE < len(self._modules) else 0
        for find, flag in some:
            module = find()
            if module is not None and module.training is not flag:
                return True
        return False

    def look(self, name: str, model: nn.Module) -> dict[str, bool] | None:
        """Check all modules; return their modes by path if these are not as before and worth a note."""
        self.root = model.training
        modules = dict(walk_paths(name, model))
        flags = {path: bool(module.training) for path, module in modules.items()}
        if flags == self._flags:
            return None
        self._flags = flags
        self._modules = [(weakref.ref(module), module.training) for module in modules.values()]
        self._place = 0
        self._changes += 1
        pattern = hash(tuple(flags.items()))
        is_new = pattern not in self._seen
        self._seen.add(pattern)
        return flags if is_new or self._changes <= _MOST else None


def _summarize(flags: dict[str, bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paths of modules in training and in eval mode, those of a subtree that is all alike by its root."""
    found: dict[bool, list[str]] = {True: [], False: []}
    uniform = _find_uniform(flags)
    covered: set[str] = set()
    for path, flag in flags.items():  # parents before children
        if _parent(path) in covered and path:
            covered.add(path)
            continue
        if path in uniform:
            covered.add(path)
        found[flag].append(path or ROOT)
    return tuple(found[True]), tuple(found[False])


def _find_uniform(flags: dict[str, bool]) -> set[str]:
    """Paths whose whole subtree has one mode."""
    mixed: set[str] = set()
    for path in reversed(flags):
        parent = _parent(path)
        if path and parent in flags and (path in mixed or flags[parent] != flags[path]):
            mixed.add(parent)
    return flags.keys() - mixed


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


# ---- dropout ----

_LISTENED = 2
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
        if seen < _LISTENED and self.host.step and not is_in_compiled_call():
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
        name = self.host.models.path_of(module) if (module := find_module(call.frame)) is not None else None
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


def find_module(frame: FrameType | None) -> nn.Module | None:
    """The module in whose call a frame is."""
    while frame is not None and frame.f_code not in MODULE_CALLS:
        frame = frame.f_back
    found = None if frame is None else read_locals(frame)[frame.f_code.co_varnames[0]]
    return found if isinstance(found, nn.Module) else None
