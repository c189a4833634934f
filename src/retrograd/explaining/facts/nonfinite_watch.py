"""Where the first number that is not finite is made: watched operation by operation, node by node, update by update.

A mask of −inf is none, nor is what nothing comes of: told is what reaches the loss, or a gradient that is applied.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from retrograd.core.history.fact import NOW
from retrograd.core.history.facts import MOST_OPTIMIZERS, NonFinite
from retrograd.core.history.sink import Moment
from retrograd.core.hooks.backward import EngineRun, backward_followers
from retrograd.core.hooks.calls import running_module
from retrograd.core.hooks.dispatch import is_in_compiled_call
from retrograd.core.hooks.finite import are_fine, is_fine, name_bad
from retrograd.core.hooks.node_tap import NodeTaps
from retrograd.core.hooks.nonfinite import BornGradient, GradientBirths, ResultWatch
from retrograd.core.hooks.torch_calls import TorchCall, tensors_of, user_line
from retrograd.core.recording.fact_source import FactHost
from retrograd.explaining.facts.graph_births import BornInGraph, find_birth
from retrograd.explaining.facts.nonfinite_look import MOST_TOLD, NonFiniteLook
from retrograd.explaining.facts.nonfinite_reasons import (
    UNNAMED_LEAF,
    Case,
    describe_values,
    find_gradient_reason,
    find_reason,
    operation_of,
)
from retrograd.explaining.facts.program import watch_program
from retrograd.following.graph.origin import Origin
from retrograd.following.graph.origins import NodePlaces

_NAMES = ("self", "other", "third", "fourth")
_TAUGHT = ("input", "target", "weight")
"""Names of operands; those of losses."""


_LENGTHS = ("targets", "input_lengths", "target_lengths")
"""Arguments of ``ctc_loss`` behind the first, which need not be tensors."""


class NonFiniteWatch(NonFiniteLook):
    """Watches every step until the first number is made that is not finite.

    Nodes of a backward pass are watched where a derivative may be infinite, and at looks. Passes of other threads than
    the one that is watched are looked at as ever.
    """

    replaces = NonFiniteLook

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._watch = host.share(watch_program)
        self._places = NodePlaces(self._watch.logs)
        self._results = ResultWatch(self._see_operation, self._search)
        self._taps = NodeTaps()
        self._runs: dict[EngineRun, GradientBirths] = {}
        self._waiting: NonFinite | None = None
        """A gradient that is not finite, and no update has been made with it yet: loss scaling may skip that."""
        self._last: NonFinite | None = None
        """Check the graph of the newest scalar: perhaps the loss of a program that looks at it before it goes on."""
        self._first_made: NonFinite | None = None
        """What an operation made first in this step."""
        self._has_passed = False
        self._updating = NOW

    def begin(self) -> None:
        """Follow all passes."""
        backward_followers.add(self)

    def forward_begins(self, model: torch.nn.Module, arguments: Any) -> None:
        """Check results from here to the update."""
        super().forward_begins(model, arguments)
        self._note(self._waiting)
        if not self._has_passed:  # what follows a pass computes with gradients: norms, clipping, unscaling
            self._last = self._results.newest or self._last
        self._has_passed, self._results.newest = False, None
        if not self._is_over and not is_in_compiled_call():
            self._watch.begin()
            self._watch.see_result = self._look
            self._watch.resume()

    def backward_begins(self, roots: tuple[Tensor, ...]) -> None:
        """Check the loss before its backward."""
        if not self._watch.is_here:
            super().backward_begins(roots)
            return
        self._is_open = False
        self._results.newest, self._has_passed = None, True
        bad = [root for root in roots if not is_fine(root)]
        self._is_over &= bool(bad) or self._told >= MOST_TOLD  # it may have recovered: loss scaling skips updates
        for root in bad:
            self._note(self._results.birth_of(root) or self._search(root))

    def run_begins(self, run: EngineRun) -> None:
        """A pass begins: watch its nodes."""
        is_ours = self._watch.is_here and not self._is_over and self._waiting is None
        is_needed = self._watch.is_rough or self.host.is_look
        if is_ours and is_needed and not run.is_batched and not run.is_nested:
            try:
                self._runs[run] = GradientBirths(self._taps, run, self._fail, self._see)
            except Exception as error:
                self._fail(error)

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """A forward has ended."""
        births = self._runs.pop(run, None)
        born = births.end() if births is not None else None
        if born is not None and error is None:
            self._waiting = self._describe_gradient(born)

    def update_begins(self, optimizer: Optimizer) -> None:
        """Stop looking at a forward; what is waiting is being applied."""
        self._note(self._waiting)
        self._updating = self.host.now
        if self._watch.is_here:
            self._forget()
            self._watch.pause()

    def update_ends(self, optimizer: Optimizer) -> None:
        """Has it made what is not finite? If it was skipped, nothing was."""
        self._waiting = None
        if self._watch.is_here:
            self._watch.resume()
            self._watch.begin_step()
        if not self._is_over and self._watch.is_here:
            groups = [(group, each) for group in optimizer.param_groups for each in group["params"]]
            if not are_fine([each for _, each in groups]):
                self._note(next((self._blame(optimizer, *each) for each in groups if not is_fine(each[1])), None))

    def end(self) -> None:
        """Leave nothing behind."""
        self._note(self._waiting)
        self._note((None if self._has_passed else self._results.newest) or self._last)
        backward_followers.remove(self)
        self._forget()
        self._watch.end()

    def _forget(self) -> None:
        self._watch.see_result = None
        self._watch.is_bad = False
        self._results.forget()

    # ---- what was found ----

    def _look(self, call: TorchCall) -> None:
        if self._results.look(call):
            self._watch.is_bad = True

    def _search(self, tensor: Tensor) -> NonFinite | None:
        """Find its origin, as far as its graph holds that."""
        born = find_birth([tensor])
        return None if born is None else replace(self._describe(born), moment=self.host.now)

    def _find_place(self, born: BornInGraph) -> dict[str, Any]:
        made = self._places.find(born.number)
        if made is None or not made.place:
            return super()._find_place(born) | ({"name": made.module} if made is not None and made.module else {})
        operation = made.operation.rstrip("_") or born.operation
        return {"name": made.module or "", "operation": operation, "line": made.place}

    def _tell_broken(self, born: BornInGraph) -> str:
        return next(map(self._describe_broken, born.operands.values()), "")

    def _note(self, found: NonFinite | None) -> None:
        if found is not None and not self._is_over:
            self._is_over = True
            self._told += 1
            self.host.note_fact(found)
        self._waiting = None

    def _fail(self, error: Exception) -> None:
        self._is_over, self._told = True, MOST_TOLD
        self.host.fault("non-finite numbers", error)

    def _see_operation(self, call: TorchCall, broken: Tensor | None) -> NonFinite:
        seen = self._see(call, broken)
        if seen.born == "forward" and (self._first_made is None or self._first_made.step != seen.step):
            self._first_made = seen
        return seen

    def _see(self, call: TorchCall, broken: Tensor | None) -> NonFinite:
        module = running_module()
        name = call.name if call.name.startswith("__") else call.name.rstrip("_")
        operands = call.operands
        made = next((each for each in tensors_of((call.result,), None) if not is_fine(each)), None)
        return NonFinite(
            name=(self.host.models.path_of(module) if module is not None else None) or "",
            born="forward" if broken is None else "update" if self._is_parameter(broken) else "input",
            operation=name,
            line=call.line,
            reason=find_reason(_make_case(name, call, made)) if broken is None else self._describe_broken(broken),
            operands=_describe(name, operands),
            made=name_bad(made),
            watched=True,
            moment=self.host.now,
        )

    def _is_parameter(self, tensor: Tensor) -> bool:
        return self.host.name_parameter(tensor) is not None

    def _describe_broken(self, tensor: Tensor) -> str:
        parameter = self.host.name_parameter(tensor)
        if parameter is None and tensor.is_leaf and tensor.requires_grad:
            return f"{UNNAMED_LEAF}: {describe_values(tensor)}"
        return f"{parameter or 'what came in'} was not finite before: {describe_values(tensor)}"

    def _describe_gradient(self, born: BornGradient) -> NonFinite:
        made = self._places.find(born.number) or Origin()
        leaf = self.host.name_parameter(born.leaf) if born.leaf is not None else None
        name = made.module or leaf or ""
        if isinstance(born.inside, NonFinite):
            return replace(born.inside, name=name, born="backward", made=born.made, moment=self.host.now)
        return NonFinite(
            name=name,
            born="backward",
            operation=operation_of(born.node),
            line=made.place or born.source,
            reason=find_gradient_reason(born.node, born.saved) or self._recall_forward(self.host.now),
            operands={name: describe_values(each) for name, each in born.saved.items() if isinstance(each, Tensor)},
            made=born.made,
            watched=True,
            moment=self.host.now,
        )

    def _recall_forward(self, moment: Moment) -> str:
        """What the forward of that step made, which a gradient may have met; empty where it made nothing."""
        made = self._first_made
        if made is None or made.step != moment.step or not made.reason:
            return ""
        inside = f" in {made.name}" if made.name else ""
        return f"the forward has made {made.made}{inside}, at {Path(made.line).name}: {made.reason}"

    def _blame(self, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> NonFinite:
        kind, gradient = type(optimizer).__name__, parameter.grad
        recalled = self._recall_forward(self._updating)
        if recalled and gradient is not None and not is_fine(gradient):
            return NonFinite(
                name=self.host.name_parameter(parameter) or "",
                born="backward",
                reason=recalled,
                made=name_bad(gradient),
                watched=True,
                moment=self._updating,
            )
        return NonFinite(
            name=self.host.name_parameter(parameter) or "",
            born="update",
            operation=f"{self.host.optimizers.find(optimizer, MOST_OPTIMIZERS)}.step",
            line=user_line(),
            reason=_judge_epsilon(kind, group.get("eps"), parameter),
            operands={} if gradient is None else {"gradient": describe_values(gradient)},
            made=name_bad(parameter),
            watched=True,
            moment=self._updating,
        )


def _judge_epsilon(optimizer: str, epsilon: Any, parameter: Tensor) -> str:
    """Return a text that eps is 0, or so small that the parameter's type has it as 0; empty where it is neither."""
    if not isinstance(epsilon, int | float) or parameter.is_complex() or bool(parameter.new_tensor(epsilon)):
        return ""
    gradient = parameter.grad
    is_zeroed = gradient is not None and bool((parameter.detach().isnan() & (gradient.detach() == 0)).any())
    if not is_zeroed and not bool(parameter.isinf().any()):
        return ""
    what = "0 / 0" if is_zeroed else "division by 0"
    kind = str(parameter.dtype).removeprefix("torch.")
    return f"{what} in {optimizer}, whose eps {f'of {epsilon:g} is 0 in {kind}' if epsilon else 'is 0'}"


def _make_case(name: str, call: TorchCall, made: Tensor | None) -> Case:
    numbers = [each for each in call.args if isinstance(each, int | float) and not isinstance(each, bool)]
    named = dict(zip(_LENGTHS, call.args[1:], strict=False)) if name == "ctc_loss" else {}
    named |= call.kwargs
    for each in call.args:
        if isinstance(each, tuple | list) and all(isinstance(dim, int) for dim in each):
            named.setdefault("dim", each)
        elif isinstance(each, str):
            named.setdefault("reduction", each)  # of a loss; no other rule asks for it
    return Case(name, call.operands, made, numbers, named)


def _describe(name: str, operands: list[Tensor]) -> dict[str, str]:
    names = _TAUGHT if "loss" in name or "entropy" in name else _NAMES
    return {title: describe_values(each) for title, each in zip(names, operands, strict=False)}
