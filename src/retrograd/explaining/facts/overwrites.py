"""Saved tensors that something overwrites before backward uses them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.history.facts import MOST_OPTIMIZERS, Overwrite
from retrograd.core.hooks.backward import EngineRun, backward_followers
from retrograd.core.hooks.engine import without_functions
from retrograd.core.hooks.nodes import name_of, number_of
from retrograd.core.hooks.optimizer import held_by
from retrograd.core.hooks.reach import PassNodes
from retrograd.core.hooks.saved import version_of
from retrograd.core.hooks.torch_calls import user_line
from retrograd.core.hooks.writes import Changed, SavedWatch
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.explaining.facts.program import watch_program
from retrograd.following.graph.origin import Origin
from retrograd.following.graph.origins import NodePlaces
from retrograd.following.graph.overwritten import Overwritten, explain_overwritten, name_behind, storage_of

_TOLD = 20
"""Writes that torch does not see, of which a run tells at most."""


class OverwriteWatch(FactSource):
    """Records lines and writes of every step, and at sampled steps digests of all that is saved.

    Attributes:
        writes: the last writes.
    """

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._watch = host.share(watch_program)
        self.writes = self._watch.writes
        self._places = NodePlaces(self._watch.logs)
        self._saved = SavedWatch(self.writes)
        self._told: set[tuple[str, str, str]] = set()

    def find(self, number: int) -> Origin | None:
        """Where the node with this sequence number was made."""
        return self._places.find(number)

    # ---- what happens ----

    def begin(self) -> None:
        """Watch the thread in which the recording begins."""
        self._watch.begin()
        backward_followers.add(self)

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """Take digests at looks."""
        if self._watch.is_here:
            takes_digests = self.host.is_look and len(self._told) < _TOLD
            self._watch.see_nodes = self._saved.see_nodes if takes_digests else None
            self._saved.forward_begins()
            self._watch.resume()

    def run_begins(self, run: EngineRun) -> None:
        """Check that what the nodes of this pass saved is unchanged."""
        if run.is_batched or self._saved.is_empty or not self._watch.is_here:
            return
        try:
            if any(isinstance(root, Tensor) and not root.requires_grad for root in run.roots):
                return
            found = PassNodes(run)
            for changed in self._saved.find_changed(found.nodes, is_kept=run.keeps_graph):
                self._tell_silent(changed)
            found.release()
        except Exception as error:
            self.host.fault("overwritten tensors", error)

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """Was it refused? What it would have run is still there."""
        if not isinstance(error, RuntimeError) or "modified by an inplace operation" not in str(error):
            return
        if run.is_batched or not self._watch.is_here:
            return
        try:
            found = PassNodes(run)
            overwritten = explain_overwritten(found.nodes, self, self.host.name_parameter)
            found.release()
            if overwritten is not None:
                self.host.note_fact(_make_fact(overwritten))
        except Exception as fault:
            self.host.fault("overwritten tensors", fault)

    def update_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Pause: what is saved from here on is of the next forward."""
        if self._watch.is_here:
            self._watch.see_nodes = None
            self._watch.pause()

    def update_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer has written to its parameters."""
        if self._watch.is_here:
            with without_functions():
                self.writes.note_update(
                    held_by(optimizer), f"{self.host.optimizers.find(optimizer, MOST_OPTIMIZERS)}.step", user_line()
                )
            self._watch.resume()

    def end(self) -> None:
        """Leave nothing behind."""
        backward_followers.remove(self)
        self._watch.end()
        self._saved.end()

    def _tell_silent(self, changed: Changed) -> None:
        origin = self.find(number_of(changed.node)) or Origin()
        writer = self.writes.since(storage_of(changed.tensor), changed.order)
        kind = name_of(changed.node)
        key = kind, origin.place, changed.name
        if key in self._told or len(self._told) >= _TOLD:
            return
        self._told.add(key)
        name = name_behind(changed.node, changed.tensor, self.host.name_parameter)
        self.host.note_fact(
            Overwrite(
                name=origin.module or "",
                tensor=name or changed.name,
                node=kind,
                saved_line=origin.place,
                written_line=writer.line if writer is not None else "",
                writer=writer.writer if writer is not None else "",
                saved_version=changed.then,
                found_version=version_of(changed.tensor),
                silent=True,
            )
        )


def _make_fact(found: Overwritten) -> Overwrite:
    last = found.writes[-1] if found.writes else None
    return Overwrite(
        name=found.module or "",
        tensor=found.parameter or found.saved,
        node=found.node,
        saved_line=found.line,
        written_line=last.line if last is not None else "",
        writer=last.writer if last is not None else "",
        saved_version=found.then,
        found_version=found.now,
    )
