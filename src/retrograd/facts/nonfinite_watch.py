"""Where the first number that is not finite is made: watched operation by operation, node by node, update by update.

A mask of −inf is none, nor is what nothing comes of: told is what reaches the loss, or a gradient that is applied.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from retrograd.facts.gradient_reasons import find_gradient_reason, operation_of
from retrograd.facts.nonfinite_look import MOST_TOLD
from retrograd.facts.reasons import Case, describe_values, find_reason
from retrograd.facts.source import FactHost, FactSource
from retrograd.history.facts import NOW, NonFinite
from retrograd.hooks.backward import EngineRun, backward_followers
from retrograd.hooks.calls import running_module
from retrograd.hooks.function_names import tensors_of
from retrograd.hooks.gradient_births import BornGradient, GradientBirths
from retrograd.hooks.node_tap import NodeTaps
from retrograd.hooks.operation_tap import is_in_compiled_call
from retrograd.hooks.result_watch import BornOperation, ResultWatch, is_fine
from retrograd.hooks.thread_logs import user_frame

_NAMES = ("self", "other", "third", "fourth")
_TAUGHT = ("input", "target", "weight")
"""Names of operands; those of losses."""


class NonFiniteWatch(FactSource):
    """Watches every step until the first number is made that is not finite."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._results = ResultWatch(host.name_module, self._see, self._fail)
        self._taps = NodeTaps()
        self._runs: dict[EngineRun, GradientBirths] = {}
        self._thread = 0
        self._waiting: NonFinite | None = None
        """A gradient that is not finite, and no update has been made with it yet: loss scaling may skip that."""
        self._last: NonFinite | None = None
        """What the newest scalar goes back to: the loss, perhaps, of a program that looks at it before it goes on."""
        self._updating = NOW
        self._told = 0
        self._is_over = False

    def begin(self) -> None:
        """Follow all passes."""
        backward_followers.add(self)

    def forward_begins(self, model: torch.nn.Module, arguments: Any) -> None:
        """Look at results from here to the update."""
        self._tell(self._waiting)
        self._last = self._results.newest or self._last
        if not self._is_over and not is_in_compiled_call():
            self._thread = threading.get_ident()
            self._results.begin()

    def backward_begins(self, roots: tuple[Tensor, ...]) -> None:
        """Is the loss finite?"""
        self._results.newest = None
        bad = [root for root in roots if not is_fine(root)]
        self._is_over &= bool(bad) or self._told >= MOST_TOLD  # it may have recovered: loss scaling skips updates
        for root in bad:
            self._tell(self._results.birth_of(root))

    def run_begins(self, run: EngineRun) -> None:
        """A pass begins: watch its nodes."""
        is_ours = self._thread == threading.get_ident() and not self._is_over and self._waiting is None
        if is_ours and not run.is_batched and not run.is_nested:
            try:
                self._runs[run] = GradientBirths(self._taps, run, self._fail)
            except Exception as error:
                self._fail(error)

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """It has ended."""
        births = self._runs.pop(run, None)
        born = births.end() if births is not None else None
        if born is not None and error is None:
            self._waiting = self._describe_gradient(born)

    def update_begins(self, optimizer: Optimizer) -> None:
        """What comes now is no forward; what is waiting is being applied."""
        self._tell(self._waiting)
        self._updating = self.host.now
        self._results.end()

    def update_ends(self, optimizer: Optimizer) -> None:
        """Has it made what is not finite? If it was skipped, nothing was."""
        self._waiting = None
        if not self._is_over and self._thread:
            groups = [(group, each) for group in optimizer.param_groups for each in group["params"]]
            self._tell(next((self._blame(optimizer, *each) for each in groups if not is_fine(each[1])), None))

    def end(self) -> None:
        """Leave nothing behind."""
        self._tell(self._waiting)
        self._tell(self._results.newest or self._last)
        backward_followers.remove(self)
        self._results.end()

    # ---- what was found ----

    def _tell(self, found: NonFinite | None) -> None:
        if found is not None and not self._is_over:
            self._is_over = True
            self._told += 1
            self.host.note_fact(found)
        self._waiting = None

    def _fail(self, error: Exception) -> None:
        self._is_over, self._told = True, MOST_TOLD
        self.host.fault("nonfinite", error)

    def _see(self, born: BornOperation) -> NonFinite:
        module = running_module()
        name = born.name if born.name.startswith("__") else born.name.rstrip("_")
        operands = tensors_of(born.args, born.kwargs)
        made = next((each for each in tensors_of((born.result,), None) if not is_fine(each)), None)
        return NonFinite(
            name=(self.host.name_module(module) if module is not None else None) or "",
            born="forward" if born.broken is None else "update" if self._is_parameter(born.broken) else "input",
            operation=name,
            line=_name_line(),
            reason=self._find_reason(name, born, operands, made),
            operands=_describe(name, operands),
            moment=self.host.now,
        )

    def _is_parameter(self, tensor: Tensor) -> bool:
        return self.host.name_parameter(tensor) is not None

    def _find_reason(self, name: str, born: BornOperation, operands: list[Tensor], made: Tensor | None) -> str:
        if born.broken is None:
            return find_reason(_make_case(name, born, operands, made))
        parameter = self.host.name_parameter(born.broken)
        return f"{parameter or 'what came in'} was not finite before: {describe_values(born.broken)}"

    def _describe_gradient(self, born: BornGradient) -> NonFinite:
        line, module = self._results.place_of(born.number)
        leaf = self.host.name_parameter(born.leaf) if born.leaf is not None else None
        return NonFinite(
            name=module or leaf or "",
            born="backward",
            operation=operation_of(born.node),
            line=line,
            reason=find_gradient_reason(born.node, born.saved),
            operands={name: describe_values(each) for name, each in born.saved.items() if isinstance(each, Tensor)},
            moment=self.host.now,
        )

    def _blame(self, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> NonFinite:
        kind = type(optimizer).__name__
        return NonFinite(
            name=self.host.name_parameter(parameter) or "",
            born="update",
            operation=f"{kind}.step",
            line=_name_line(),
            reason=f"0 / 0 in {kind}, whose eps is 0" if group.get("eps") == 0 else "",
            operands={} if parameter.grad is None else {"gradient": describe_values(parameter.grad)},
            moment=self._updating,
        )


def _name_line() -> str:
    frame = user_frame(sys._getframe(1))
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _make_case(name: str, born: BornOperation, operands: list[Tensor], made: Tensor | None) -> Case:
    numbers = [each for each in born.args if isinstance(each, int | float) and not isinstance(each, bool)]
    named = dict(born.kwargs)
    for each in born.args:
        if isinstance(each, tuple | list) and all(isinstance(dim, int) for dim in each):
            named.setdefault("dim", each)
    return Case(name, operands, made, numbers, named)


def _describe(name: str, operands: list[Tensor]) -> dict[str, str]:
    names = _TAUGHT if "loss" in name or "entropy" in name else _NAMES
    return {title: describe_values(each) for title, each in zip(names, operands, strict=False)}
