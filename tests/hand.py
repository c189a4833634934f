"""What a recording of a trial should hold, and what a rule should do to it: written down by torch's own hooks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.scenarios import Trial, now


class Key(NamedTuple):
    """Where a row belongs. ``backward`` is −1 for what is no gradient."""

    site: str
    phase: str
    step: int
    micro: int
    backward: int


def leaves(nest: Any, slot: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nest, by its slot."""
    if isinstance(nest, Tensor):
        yield slot, nest
        return
    if isinstance(nest, Mapping):
        items: Any = nest.items()
    elif hasattr(nest, "_fields"):
        items = zip(nest._fields, nest, strict=True)
    elif isinstance(nest, (list, tuple)):
        items = enumerate(nest)
    elif is_dataclass(nest):
        items = ((each.name, getattr(nest, each.name)) for each in fields(nest))
    else:
        return
    for key, item in items:
        yield from leaves(item, f"{slot}.{key}")


def named_modules(trial: Trial) -> Iterator[tuple[str, nn.Module]]:
    for model, root in trial.modules.items():
        for path, module in root.named_modules():
            yield ".".join(part for part in (model, path) if part) or "self", module


def named_parameters(trial: Trial) -> Iterator[tuple[str, nn.Parameter]]:
    for path, module in named_modules(trial):
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}:{name}", parameter


@contextmanager
def listen(trial: Trial) -> Iterator[dict[Key, list[Tensor]]]:
    """The tensors of every row, in the order in which they come.

    Outputs of modules, their gradients, those of parameters, and what optimizers add; no part may be computed twice.
    """
    rows: dict[Key, list[Tensor]] = defaultdict(list)
    counts: dict[tuple[str, str, int, int], int] = defaultdict(int)
    handles: list[Any] = []

    def take(site: str, tensor: Tensor, *, gradient: bool = False, micro: tuple[int, int] | None = None) -> None:
        step, number = micro or (now.step, now.micro)
        key = Key(site, now.phase, step, number, now.backward if gradient else -1)
        rows[key].append(tensor.detach().clone())

    def see_output(path: str, output: Any) -> None:
        where = (now.step, now.micro)
        name = path
        counts[path, now.phase, *where] += 1
        call = counts[path, now.phase, *where]
        name = path if call == 1 else f"{path}#{call}"
        for slot, tensor in leaves(output, "output"):
            take(f"{name}:{slot}", tensor)
            if tensor.requires_grad and now.phase == "train":
                site = f"{name}:{slot}.grad"

                def see(gradient: Tensor, site: str = site, is_leaf: bool = tensor.is_leaf) -> None:
                    if not is_leaf or where == (now.step, now.micro):  # a leaf outlives the step, and its hooks
                        take(site, gradient * now.unscale, gradient=True, micro=where)

                tensor.register_hook(see)

    def begin(*_: Any) -> None:
        if now.phase != "train":
            counts.clear()  # forwards of an evaluation add up

    handles += [model.register_forward_pre_hook(begin) for model in trial.modules.values()]
    seen: set[int] = set()
    for path, module in named_modules(trial):
        handles.append(module.register_forward_hook(lambda _, args, output, path=path: see_output(path, output)))

    def begin_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        before.append({site: each.detach().clone() for site, each in names.items() if id(each) in held})

    def end_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for site, weights in before.pop().items():
            take(f"{site}.update", names[site].detach() - weights)

    before: list[dict[str, Tensor]] = []
    names: dict[str, nn.Parameter] = {}
    handles += [register_optimizer_step_pre_hook(begin_update), register_optimizer_step_post_hook(end_update)]
    for site, parameter in named_parameters(trial):
        if id(parameter) in seen or not parameter.requires_grad:
            continue
        seen.add(id(parameter))
        names[site] = parameter
        handles.append(
            parameter.register_hook(
                lambda gradient, site=site: take(f"{site}.grad", gradient * now.unscale, gradient=True)
            )
        )
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def listen_to_optimizers(trial: Trial) -> Iterator[dict[tuple[str, int], Tensor]]:
    """The gradient that lies at each parameter when an optimizer begins to update, by its site and the step."""
    found: dict[tuple[str, int], Tensor] = {}

    def begin_update(*_: Any) -> None:
        for site, parameter in named_parameters(trial):
            if parameter.grad is not None:
                found[site, now.step] = parameter.grad.detach().clone()

    handle = register_optimizer_step_pre_hook(begin_update)
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def change_gradients(trial: Trial, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The gradient of all that modules return, changed by a bare hook on each tensor."""

    def see(module: nn.Module, args: Any, output: Any) -> None:
        for _, tensor in leaves(output, ""):
            if tensor.requires_grad:
                tensor.register_hook(change)

    handles = [module.register_forward_hook(see) for _, module in named_modules(trial)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
