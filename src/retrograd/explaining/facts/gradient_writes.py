"""Hooks that write in place into a gradient which another branch is handed in the same memory, at looks."""

from __future__ import annotations

from typing import Any

from torch import nn

from retrograd.core.history.facts import SharedWrite
from retrograd.core.hooks.backward import EngineRun, backward_followers, runs_in_another_thread
from retrograd.core.hooks.nodes import name_of, number_of, variable_of
from retrograd.core.hooks.reach import PassNodes
from retrograd.core.hooks.shared_gradients import (
    GradientWrite,
    SharedGradients,
    has_hooks_of_program,
    is_written_by_program,
    tables_of_leaves,
)
from retrograd.core.hooks.torch_calls import describe_function
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.explaining.facts.program import watch_program
from retrograd.following.graph.origin import Origin
from retrograd.following.graph.origins import NodePlaces

_TOLD = 20
"""Writes of which a run tells at most."""


class GradientWriteWatch(FactSource):
    """Records each hook that has changed the gradient of another branch, once.

    A pass is watched if hooks of the program's are on its tensors or modules, or Functions of the program's are in it;
    hooks on nodes are not known. Passes that return gradients are left out.
    """

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._watch = host.share(watch_program)
        self._places = NodePlaces(self._watch.logs)
        self._pass: tuple[EngineRun, SharedGradients] | None = None
        self._told: set[tuple[str, str, str]] = set()

    def begin(self) -> None:
        """Watch passes from now on."""
        backward_followers.add(self)

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """Forget hooks of graphs that are gone."""
        if self._watch.is_here:
            self._watch.tables[:] = [find for find in self._watch.tables if find() is not None]

    def run_begins(self, run: EngineRun) -> None:
        """A pass is about to run."""
        is_whole = run.accumulates and not (run.inputs or run.is_nested or run.is_batched)
        if not is_whole or not self.host.is_look or len(self._told) >= _TOLD:
            return
        if not self._watch.is_here or self._pass is not None or runs_in_another_thread():
            return
        try:
            found = PassNodes(run)
            known = {id(table): table for find in self._watch.tables if (table := find()) is not None}
            known |= {id(table): table for table in tables_of_leaves(found.nodes)}
            tables = [table for table in known.values() if has_hooks_of_program(table)]
            if tables or any(map(is_written_by_program, found.nodes)):
                self._pass = run, SharedGradients(found, tables, self._note, self._fail)
            else:
                found.release()
        except Exception as error:
            self._fail(error)

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """It has ended."""
        if self._pass is not None and self._pass[0] is run:
            self._end_pass()

    def end(self) -> None:
        """Leave nothing behind."""
        backward_followers.remove(self)
        self._end_pass()

    def _end_pass(self) -> None:
        watched, self._pass = self._pass, None
        if watched is not None:
            watched[1].end()

    def _fail(self, error: Exception) -> None:
        self.host.fault("gradient_writes", error)

    def _note(self, write: GradientWrite) -> None:
        hook, hook_line = describe_function(write.hook) if write.hook is not None else ("", "")
        module, tensor, line = self._find(write.node)
        if write.module is not None:
            module, tensor, line = self.host.models.path_of(write.module) or "", "", ""
        harmed_in, harmed, harmed_line = self._find(write.harmed[0])
        key = hook_line, line or tensor or module, harmed_line or harmed
        if key not in self._told:
            self._told.add(key)
            self.host.note_fact(
                SharedWrite(
                    name=module,
                    value=len(write.harmed),
                    hook=hook,
                    hook_line=hook_line,
                    node=name_of(write.node),
                    tensor=tensor,
                    line=line,
                    harmed=harmed,
                    harmed_in=harmed_in,
                    harmed_line=harmed_line,
                )
            )

    def _find(self, node: Any) -> tuple[str, str, str]:
        """Module, operation and line that made what a node is given the gradient of; the name of a parameter."""
        leaf = variable_of(node)
        if leaf is not None:
            return "", self.host.name_parameter(leaf) or "", ""
        made = self._places.find(number_of(node)) or Origin()
        return made.module or "", made.operation, made.place
