"""Runs of a copy of a model that differ in what it is called with, and in nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from retrograd.core.errors import ProbeError
from retrograd.core.hooks.calls import running_module
from retrograd.core.hooks.isolation import clone, copy_nest, copy_or_refuse, isolated_autograd, unseen_by_discovery
from retrograd.core.hooks.names import compiled_regions, walk_modules
from retrograd.core.hooks.nested import Keys, flatten
from retrograd.core.hooks.torch_calls import name_function, tensors_of, user_line
from retrograd.core.trials import everything_restored
from retrograd.explaining.probes.batch import Arguments

MOST = 1 << 28
"""Elements of results that are held to find an operation; behind them no place is found."""

Outputs = dict[Keys, Tensor]


@dataclass(slots=True, eq=False)
class Made:
    """An operation of a run, with copies of what it made.

    Attributes:
        name: of the function.
        line: who called it.
        module: the path of the module it is in.
        takes: numbers of the operations that made its operands.
        tensors: what it made.
        is_used: a later operation takes that, or the model returns it.
        output: where in what the model returns that is.
    """

    name: str
    line: str
    module: str
    takes: tuple[int, ...]
    tensors: list[Tensor]
    is_used: bool = False
    output: Keys | None = None


class Trial:
    """A copy of a model, for several runs; the model itself is not touched.

    Args:
        model: it is copied, in its mode.
        path: of the model in the names of modules; empty for none.

    Attributes:
        model: the copy.
        masks: sizes of the triangular masks that runs were given; 0 where an operation was told to be causal.
        norms: calls of batch norm with statistics of the batch, in the last run.

    Raises:
        ProbeError: it is none, or cannot be copied.
    """

    def __init__(self, model: nn.Module, path: str = "") -> None:
        self.model = copy_for_trial(model)
        entries = walk_modules(path, self.model)
        self._paths = {id(each.module): each.path for each in entries}
        self._is_compiled = bool(compiled_regions(entries))
        self.masks: set[int] = set()
        self.norms = 0

    def run(self, arguments: Arguments, made: list[Made] | None = None, *, without_norm: bool = False) -> Outputs:
        """Run the copy once; each run draws the same random numbers and begins with the same buffers.

        Args:
            arguments: what it is called with; it gets copies.
            made: the operations are added to it.
            without_norm: batch norm does not take statistics of the batch.

        Returns:
            Copies of the tensors that it returns, by their keys.
        """
        args, kwargs = copy_nest((arguments.args, arguments.kwargs), clone)
        watch = _Operations(self, made, without_norm=without_norm)
        eager: Any = torch.compiler.set_stance("force_eager") if self._is_compiled else nullcontext()
        with _alone(self.model), eager, watch:
            found = self.model(*args, **kwargs)
            outputs = {keys: clone(each) for keys, each in flatten(found, ())}
        self.norms = watch.norms
        if made is not None:
            watch.end(found)
        return outputs

    def has_mask(self, positions: int) -> bool:
        """Return whether a run has hidden what is behind each of so many positions."""
        return bool(self.masks & {0, positions})

    def path_of(self, module: nn.Module | None) -> str:
        """The path of a module of the copy."""
        return self._paths.get(id(module), "")


def copy_for_trial(model: nn.Module) -> nn.Module:
    """Copy a model with the hooks that its user has set.

    Raises:
        ProbeError: it is none, or cannot be copied.
    """
    while type(model).__name__ == "DistributedDataParallel":
        model = model.module  # type: ignore[assignment]
    if not isinstance(model, nn.Module):
        raise ProbeError(
            f"{type(model).__name__} is not a torch.nn.Module.", repair="give the model first, and then the batch."
        )
    with unseen_by_discovery():
        repair = "take off it what cannot be copied (open files, locks, process groups), or probe a part of it."
        return copy_or_refuse(model, ProbeError, repair)


@contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    with unseen_by_discovery(), isolated_autograd(), everything_restored(model):
        yield


class _Operations(TorchFunctionMode):
    """Sees the operations of a run: keeps what they make, if asked, and keeps batch norm apart."""

    def __init__(self, trial: Trial, made: list[Made] | None, *, without_norm: bool) -> None:
        super().__init__()
        self._trial, self._made, self._without_norm = trial, made, without_norm
        self._makers: dict[int, int] = {}
        self._held: list[Any] = []
        self._room = MOST
        self.norms = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.batch_norm and _uses_batch(*args, **_renamed(kwargs)):
            self.norms += 1
            if self._without_norm:
                args, kwargs = _without_batch(*args, **_renamed(kwargs))
        operands = tensors_of(args, kwargs)
        self._trial.masks |= {each.size(-1) for each in operands if is_causal_mask(each)}
        self._trial.masks |= {0} if kwargs.get("is_causal") is True else set()
        result = function(*args, **kwargs)
        if self._made is not None and self._room > 0 and (name := name_function(function)):
            self._keep(self._made, name, operands, args[:1] if name == "setitem" else result)
        return result

    def _keep(self, made: list[Made], name: str, operands: list[Tensor], result: Any) -> None:
        tensors = tensors_of((result,), None)
        if not tensors:
            return
        takes = tuple(self._makers[id(each)] for each in operands if id(each) in self._makers)
        for number in takes:
            made[number].is_used = True
        line, path = user_line(sys._getframe(2)), self._trial.path_of(running_module())
        made.append(Made(name, line, path, takes, [clone(each) for each in tensors]))
        self._room -= sum(each.numel() for each in tensors)
        for each in tensors:
            self._held.append(each)  # so that no other gets its identity
            self._makers[id(each)] = len(made) - 1
            if (name.endswith("_") or name == "setitem") and each._is_view() and each._base is not None:
                self._makers[id(each._base)] = len(made) - 1

    def end(self, outputs: Any) -> None:
        """Mark what the model returns, and hold nothing more."""
        for keys, each in flatten(outputs, ()):
            if self._made is not None and id(each) in self._makers:
                maker = self._made[self._makers[id(each)]]
                maker.is_used, maker.output = True, keys
        self._held.clear()


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"given" if name == "input" else name: each for name, each in kwargs.items()}


def _uses_batch(
    given: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    *rest: Any, **named: Any,
) -> bool:  # fmt: skip
    return training


def _without_batch(
    given: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    *rest: Any, **named: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """The arguments of batch norm with a mean of 0 and a variance of 1 in place of the batch's."""
    mean = torch.zeros(given.size(1), device=given.device, dtype=given.dtype if weight is None else weight.dtype)
    return (given, mean, torch.ones_like(mean), weight, bias, False, *rest), named


def is_causal_mask(tensor: Tensor) -> bool:
    """Return whether a tensor [..., n, n] has one value up to the diagonal and another one behind it."""
    if tensor.dim() < 2 or tensor.size(-1) != tensor.size(-2) or tensor.size(-1) < 3 or tensor.requires_grad:
        return False
    square = tensor.detach().reshape(-1, *tensor.shape[-2:])[0]
    if square.dtype.is_complex:
        return False
    behind = torch.ones_like(square, dtype=torch.bool).triu(1)
    hidden, seen = square[behind], square[~behind]
    return bool((hidden == hidden[0]).all() and (seen == seen[0]).all() and hidden[0] != seen[0])
