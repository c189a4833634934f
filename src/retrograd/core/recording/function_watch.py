"""Records what functions return that recorded modules call, and the gradients of that, where a pattern names them."""

from __future__ import annotations

from torch import nn

from retrograd.core.hooks.engine import uncompiled
from retrograd.core.hooks.function_taps import FunctionTap
from retrograd.core.hooks.names import ModelNames
from retrograd.core.hooks.torch_calls import TorchCall
from retrograd.core.recording.mode_buffer import ModeBuffer
from retrograd.core.recording.module_watch import SlotWatch
from retrograd.core.recording.site_recorder import RecorderFactory, SiteRecorder
from retrograd.core.recording.taps import Taps
from retrograd.core.sites.pattern import UNKNOWN_NODE, Candidate
from retrograd.core.sites.site import Site


class FunctionWatch(SlotWatch):
    """Records what one function returns that one module calls.

    Args:
        factory: makes the recorders.
        module: the module, which is not held.
        path: its path, a slash and the function's name.
        node: the kind of node that it makes.
    """

    __slots__ = ("_node",)

    def __init__(self, factory: RecorderFactory, module: nn.Module, path: str, node: str) -> None:
        super().__init__(factory, module, path, ("output",))
        self._node = node

    def _make_site_recorder(self, buffer: ModeBuffer, site: Site) -> SiteRecorder | None:
        module = self._module() if self._module is not None else None
        return self._factory.make_site_recorder(buffer, module, site, self._node)


class FunctionWatches(FunctionTap[FunctionWatch]):
    """The watches of all functions.

    Args:
        factory: makes the recorders.
        taps: takes the watches.
        models: the recorded ones.

    Attributes:
        nodes: for each path the kinds of nodes that were made there.
    """

    height = 2

    def __init__(self, factory: RecorderFactory, taps: Taps, models: ModelNames) -> None:
        super().__init__(models, factory.settings.selections)
        self._factory = factory
        self._taps = taps
        self._clock = factory.backward.clock
        self.nodes: dict[str, set[str]] = {}

    def is_wanted(self, module: nn.Module) -> bool:
        """Return whether taps have something to do."""
        return self._clock.awake

    def make_entry(self, module: nn.Module, path: str, node: str) -> FunctionWatch | None:
        """The watch of a function, if something of it is wanted."""
        node = "" if node == UNKNOWN_NODE else node
        self.nodes.setdefault(path, set()).add(node)
        site = Site(path, ("output",))
        if not any(self._factory.settings.may_reach(Candidate(each, module, node)) for each in (site, site.grad)):
            return None
        watch = FunctionWatch(self._factory, module, path, node)
        self._taps.add_slot(watch)
        return watch

    @uncompiled
    def show(self, entry: FunctionWatch, call: TorchCall, taken: object) -> None:
        """Record what a function has returned."""
        entry.after_forward(None, (), call.result)

    def fail(self, error: Exception) -> None:
        """Nothing more is recorded of functions in this forward."""
        self._factory.events.fault("functions", error)
