"""What copies of the program's models and Functions answer: do samples mix, is the future seen, is a backward right?

Asked once for each model, at the step that is looked at after two updates: what begins with weights of zero hides
nothing by then. The batch is copied when the model is called, and all runs are made between two steps.
"""

from __future__ import annotations

import dis
import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrograd.core.errors import ProbeError
from retrograd.core.history.fact import NOW, Fact
from retrograd.core.history.probe_facts import FunctionCheck, Probe
from retrograd.core.hooks.dispatch import is_in_compiled_call
from retrograd.core.hooks.engine import grad_enabled, is_in_backward, uncompiled, without_functions
from retrograd.core.hooks.function_mode import ForwardListener
from retrograd.core.hooks.functions import FunctionClass, forwards_by_code
from retrograd.core.hooks.isolation import clone, copy_nest
from retrograd.core.hooks.names import compiled_regions, walk_modules
from retrograd.core.hooks.torch_calls import TorchCall, is_installed, user_line
from retrograd.core.ranks.processes import count_processes
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.core.sites.site import ROOT
from retrograd.explaining.probes.batch import Arguments, Axis
from retrograd.explaining.probes.effects import CallsOfProgram
from retrograd.explaining.probes.functions import check_function
from retrograd.explaining.probes.mixing import PositionProbe, SampleProbe
from retrograd.explaining.probes.result import Mixing
from retrograd.explaining.probes.trial import Trial

_BEFORE = 2
"""Recorded steps before that at which is asked."""

_MOST_MODELS = 3
_MOST_WEIGHTS, _MOST_INPUTS = 200_000_000, 4_000_000
"""Elements of a model that is copied, and of a batch; a larger one is not asked."""

_LOSSES = frozenset({"cross_entropy", "nll_loss", "gather", "getitem", "one_hot", "take_along_dim"})
"""Functions that pick what belongs to a target."""


class ProbeWatch(FactSource):
    """Asks copies, once the step is over."""

    def __init__(self, host: FactHost) -> None:
        super().__init__(host)
        self._models: dict[int, tuple[nn.Module, Arguments]] = {}
        self._asked: set[str] = set()
        self._calls = CallsOfProgram()
        self._moment = NOW
        self._listener = _Listener(lambda error: host.fault("probes", error))

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        """Keep a copy of the first batch of a model that is trained."""
        if self.host.recorded != _BEFORE or not self.host.is_recorded or not grad_enabled() or not model.training:
            return
        if is_in_compiled_call() or len(self._asked) >= _MOST_MODELS:
            return
        if not self._listener.is_started:
            self._listener.begin()
            self._moment = self.host.now
        name = self.host.models.path_of(model) or ROOT
        if name not in self._asked:
            self._asked.add(name)
            with without_functions():
                self._listener.tokens = [
                    each for each in map(_tokens_of, [*arguments[0], *arguments[1].values()]) if each is not None
                ]
                why = _find_obstacle(model, Arguments(*arguments))
                if why:
                    self._note_all(name, why)
                else:
                    self._models[id(model)] = model, Arguments(*copy_nest(arguments, clone))
                    self._calls.start()

    def forward_ends(self, model: nn.Module, output: Any, failed: bool) -> None:
        """Ask no model whose forward may have changed more than itself."""
        if id(model) in self._models:
            is_known = self._calls.is_on
            self._calls.stop()
            if failed or not is_known or self._calls.leave_something():
                name = self.host.models.path_of(self._models.pop(id(model))[0]) or ROOT
                self._note_all(name, "its forward may change what outlives the call")

    def update_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Listen no more."""
        self._stop()

    def drain(self) -> None:
        """Ask, between two steps."""
        if self._models or self._listener.called:
            models, called = list(self._models.values()), list(self._listener.called.items())
            has_targets = self._listener.is_next_token
            self._models.clear()
            self._listener.called.clear()
            for fact in _run_apart(lambda: [*self._ask(models, next_token=has_targets), *self._check(called)]):
                self.host.note_fact(fact)

    def end(self) -> None:
        """Leave nothing behind."""
        self._stop()
        self._calls.stop()
        self._models.clear()
        self._listener.called.clear()

    def _stop(self) -> None:
        if self._listener.is_started and not is_in_backward():
            self._listener.stop()
            self._listener.tokens.clear()

    def _note_all(self, name: str, why: str) -> None:
        for question in ("samples", "positions"):
            self.host.note_fact(Probe(name=name, question=question, why_not=why, moment=self.host.now))

    def _check(self, called: list[tuple[FunctionClass, _Called]]) -> list[Fact]:
        return [replace(_check(*each), moment=self._moment) for each in called]

    def _ask(self, models: list[tuple[nn.Module, Arguments]], *, next_token: bool) -> list[Fact]:
        found: list[Fact] = []
        for model, arguments in models:
            name = self.host.models.path_of(model) or ROOT
            asker = _Asker(model, "" if name == ROOT else name, arguments, next_token=next_token)
            found += [
                _probe("samples", name, asker.ask_samples),
                _probe("positions", name, asker.ask_positions, next_token=next_token),
            ]
        return [replace(each, moment=self._moment) for each in found]


def _find_obstacle(model: nn.Module, arguments: Arguments) -> str:
    """Why a model is not asked; empty where it is."""
    if count_processes() > 1:
        return "several processes train together"
    if compiled_regions(walk_modules("", model)):
        return "it is compiled"
    if sum(each.numel() for each in model.parameters()) > _MOST_WEIGHTS:
        return "the model is large to be copied"
    if sum(each.numel() for _, each in arguments.tensors()) > _MOST_INPUTS:
        return "the batch is large to be copied"
    return ""


class _Asker:
    """Asks one model."""

    def __init__(self, model: nn.Module, path: str, arguments: Arguments, *, next_token: bool) -> None:
        self._trial = Trial(model, path)
        self._arguments, self._next_token = arguments, next_token

    def ask_samples(self) -> tuple[Mixing, bool]:
        """Do samples depend on each other? If so, does another dimension fit samples better?"""
        found = SampleProbe(self._trial, self._arguments, 0).ask()
        return found, not found and self._fits_other()

    def ask_positions(self) -> tuple[Mixing, bool]:
        """Do positions depend on later ones? Asked where a mask or the targets say that they should not."""
        axis = Axis(self._arguments, 1, PositionProbe.what)
        if not self._next_token and not self._trial.has_mask(axis.size):
            raise ProbeError("Neither a mask nor the targets say that it is causal.")
        if axis.count_sequences() != 1:
            raise ProbeError("The model is not called with one sequence alone.")
        return PositionProbe(self._trial, self._arguments, 1).ask(), False

    def _fits_other(self) -> bool:
        try:
            return SampleProbe(self._trial, self._arguments, 1).is_anonymous()
        except ProbeError:
            return False


def _probe(question: str, name: str, ask: Callable[[], tuple[Mixing, bool]], *, next_token: bool = False) -> Probe:
    """Make the fact of an answer, or of why there is none."""
    try:
        found, fits_other = ask()
    except ProbeError as error:
        return Probe(name=name, question=question, why_not=error.problem)
    except Exception as error:  # the program's, on a batch that it never had
        return Probe(
            name=name, question=question, why_not=f"the model raises {type(error).__name__} on other {question}"
        )
    return Probe(
        name=name,
        value=float(found.mixes),
        question=question,
        called_with=found.called_with,
        only_batch_norm=found.only_batch_norm,
        operation=found.operation,
        module=found.module,
        line=found.line,
        reason=found.reason,
        shape=found.shape,
        fits_other=fits_other,
        has_mask=found.has_mask,
        next_token=next_token,
    )


def _run_apart(ask: Callable[[], list[Fact]]) -> list[Fact]:
    """Run in a thread that has none of the modes of this one."""
    found: list[Fact] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.extend(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="retrograd-aside", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found


# ---- what is seen while the step runs ----


class _Called(NamedTuple):
    """A call of a Function: what its forward was given, and who called it."""

    args: list[Any]
    names: list[str]
    line: str


class _Listener(ForwardListener):
    """Keeps what Functions of the program are called with, and compares targets with the tokens that came in.

    Attributes:
        called: the first call of each Function.
        tokens: copies of integer inputs, [samples, positions].
        is_next_token: a target was the tokens, one position on.
    """

    def __init__(self, fault: Callable[[Exception], None]) -> None:
        super().__init__()
        self._fault = fault
        self.called: dict[FunctionClass, _Called] = {}
        self.tokens: list[Tensor] = []
        self.is_next_token = False
        self._forwards: dict[Any, FunctionClass] = {}

    def begin(self) -> None:
        """Begin with the Functions that there are by now."""
        self._forwards = {
            code: each for code, each in forwards_by_code().items()
            if not is_installed[code.co_filename]
        }  # fmt: skip
        self.start()

    def fail(self, error: Exception) -> None:
        """Keep nothing more."""
        self._fault(error)

    @uncompiled
    def before(self, call: TorchCall) -> None:
        """A torch function is called: perhaps in a forward of a Function, perhaps with a target."""
        with without_functions():
            if self._forwards:
                self._keep_call(call.frame)
            if self.tokens and not self.is_next_token and call.name in _LOSSES:
                self.is_next_token = any(is_next(each, other) for each in call.operands for other in self.tokens)

    def after(self, call: TorchCall, seen: Any) -> None:
        """Nothing is asked of results."""

    def _keep_call(self, frame: FrameType | None) -> None:
        while frame is not None:
            kind = self._forwards.get(frame.f_code)
            if kind is not None and kind not in self.called:
                values = inspect.getargvalues(frame)
                has_context = kind.setup_context is torch.autograd.Function.setup_context
                names = values.args[int(has_context) :]
                args = [values.locals[each] for each in names] + list(
                    values.locals[values.varargs] if values.varargs else ()
                )
                kept = [_keep(each) for each in args]
                self.called[kind] = _Called(kept, names, user_line(frame.f_back))
            frame = frame.f_back


def _keep(value: Any) -> Any:
    return clone(value).requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _tokens_of(value: Any) -> Tensor | None:
    is_ids = isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point() and value.size(1) > 3
    return value.detach().clone() if is_ids else None


def is_next(target: Tensor, tokens: Tensor) -> bool:
    """Return whether integer targets are tokens [samples, positions], one position on; −100 is passed over."""
    samples, positions = tokens.shape
    if target.is_floating_point() or target.device != tokens.device:
        return False
    if target.numel() == samples * positions:
        target = target.reshape(samples, positions)[:, :-1]
    elif target.numel() != samples * (positions - 1):
        return False
    target, tokens = target.reshape(samples, positions - 1), tokens[:, 1:]
    counts = target >= 0
    return (
        int(counts.sum()) >= samples
        and bool((target == tokens)[counts].all())
        and bool((target[counts] != target[counts][0]).any())
    )


def _check(kind: FunctionClass, called: _Called) -> FunctionCheck:
    verdict = check_function(kind, called.args)
    code = inspect.unwrap(kind.backward).__code__
    returns = [
        each.positions.lineno
        for each in dis.get_instructions(code)
        if each.opname.startswith("RETURN_") and each.positions
    ]
    at = verdict.argument
    return FunctionCheck(
        name=kind.__name__,
        value=verdict.ratio,
        verdict=verdict.word,
        why_not=verdict.why,
        argument=called.names[at] if at < len(called.names) else str(at),
        is_linear=verdict.is_linear,
        line=f"{code.co_filename}:{returns[-1] if returns and returns[-1] else code.co_firstlineno}",
        called=called.line,
    )
