"""``rg.explain_gradients``: why ``.grad`` is None, or zero."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from retrograd.errors import GraphError
from retrograd.gradients.gradient_reasons import GradientReasons
from retrograd.gradients.judging import Leaf
from retrograd.hooks.names import walk_parameters
from retrograd.sites.site import parse_site

Model = nn.Module | Mapping[str, nn.Module]


def explain_gradients(
    model: Model,
    loss: Any = None,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> GradientReasons:
    """Say why the gradient of each parameter is None, or zero, or why it is there.

    Around forward and backward it names the line where a gradient was lost::

        with rg.explain_gradients(model) as why:
            loss = criterion(model(batch), target)
            loss.backward()
        print(why)

    Given a loss, before or after ``backward()`` and without any preparation, it tells what the graph of the loss tells,
    and says what only a block could tell: ``print(rg.explain_gradients(model, loss))``.

    Nothing is changed: in a block, gradients are looked at node by node, which waits for the device.

    Args:
        model: whose parameters are asked of; or several models by name.
        loss: a tensor, or several in a list, tuple or dict.
        optimizer: tells also what no optimizer holds, and what one holds that the model has not.
        tensors: further tensors by name.

    Returns:
        A mapping from names, ``"fc:weight"``, to a :class:`~retrograd.gradients.reason.Reason` each. Its ``missing``
        are those where something is missing or zero, and its ``findings`` put together what has one cause.

    Raises:
        GraphError: ``model`` is not a module, or a tensor is none.
    """
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    _check(models, tensors or {})
    leaves = list(_find_leaves(models, tensors or {}))
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    reasons = GradientReasons(models, leaves, list(_find_held(optimizers, leaves)))
    if optimizers:
        reasons.hold_against([each for one in optimizers for group in one.param_groups for each in group["params"]])
    if loss is not None:
        reasons.look_at(loss)
    return reasons


def _find_leaves(models: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> Iterator[Leaf]:
    known: set[int] = set()
    for name, tensor in (*walk_parameters(models.items()), *tensors.items()):
        if id(tensor) not in known:
            module = parse_site(name).path if ":" in name and name not in tensors else ""
            yield Leaf(len(known), name, tensor, module)
            known.add(id(tensor))


def _find_held(optimizers: Sequence[Optimizer], leaves: Sequence[Leaf]) -> Iterator[Leaf]:
    known = {id(leaf.tensor) for leaf in leaves}
    for number, optimizer in enumerate(optimizers):
        for group, settings in enumerate(optimizer.param_groups):
            for index, tensor in enumerate(settings["params"]):
                if id(tensor) not in known:
                    yield Leaf(len(known), f"optimizer {number}, group {group}, tensor {index}", tensor)
                    known.add(id(tensor))


def _check(models: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
    for model in models.values():
        if not isinstance(model, nn.Module):
            raise GraphError(
                f"{type(model).__name__} is not a torch.nn.Module.",
                repair="give the model first: rg.explain_gradients(model, loss).",
            )
    for name, each in tensors.items():
        if not isinstance(each, Tensor):
            raise GraphError(f"{name!r} names a {type(each).__name__}.", repair="give tensors by name: {'x': x}.")
