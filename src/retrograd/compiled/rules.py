"""Rules inside compiled code: operations in its graph, which ask the rules that eager code asks.

While torch.compile traces a hook that rewrites, :func:`trace_rules` puts one operation into the graph:
``retrograd::rules``. When the graph is traced once more, with its backward, this becomes several. ``begin_call``
numbers the call; ``change_value`` takes a tensor, and gives what its rules have made of it; hooks on tensors, set in
the trace, become ``change_gradient`` in the graph of the backward. So rules are not traced: they run as in eager code,
whatever they do, remember or print, and the graph is the same whichever they are.

Handles and run ids are those of ``handles.py``. A run id stands for one call of a module, or for the graph that
rules have made of a value, through which the gradient goes back.

A compiler may write into memory that is free, and it knows nothing of what rules hold. So a rule is given memory that
nobody else writes into, and what it returns is copied where somebody else has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retrograd.compiled.handles import Numbered, owner_of
from retrograd.compiled.inductor import teach_inductor
from retrograd.compiled.operations import (
    call_plainly,
    count_traced,
    define,
    implement,
    new_run_id,
    save_last_traced,
)
from retrograd.compiled.taps import comes_together_at, find_places, mark_rewritten
from retrograd.compiled.wrappers import BETWEEN
from retrograd.core.errors import CannotRewriteError
from retrograd.core.hooks.engine import uncompiled
from retrograd.core.hooks.gradients import branch
from retrograd.core.hooks.gradients import change_gradient as hook_gradient
from retrograd.core.hooks.isolation import isolated_autograd
from retrograd.core.hooks.nested import Keys
from retrograd.core.hooks.nodes import is_leaf, root_edges, variable_of
from retrograd.core.hooks.reach import find_nodes
from retrograd.core.hooks.rule_taps import CallUnderRules
from retrograd.core.hooks.saved import top_pair
from retrograd.core.hooks.storages import is_held_elsewhere

_calls: Numbered[CallUnderRules | None] = Numbered(torch.uint32)
_graphs: Numbered[tuple[Tensor, ...] | None] = Numbered(torch.uint32)
_NO_CALL = _calls.add(None)
_UNCHANGED = _graphs.add(None)  # the first: LEFT_ALONE
_CUT = _graphs.add(())
"""For a value that no gradient goes back to."""


def trace_forward(handle: Tensor, *, begins: bool) -> None:
    """Put into the graph that is being traced that the forward of a model begins, or ends."""
    _FORWARD(handle, begins, torch.is_grad_enabled())


def trace_rules(
    handle: Tensor,
    tensors: Sequence[tuple[Keys, Tensor, bool, bool, bool]],
    training: bool,
    *,
    needs_value: bool = False,
    inputs: Sequence[tuple[Keys, Tensor]] = (),
) -> list[Tensor]:
    """Put rules into the graph that is being traced; returns the tensors to go on with.

    Args:
        handle: of the slot.
        tensors: each with its keys, whether rules act on its value, and on its gradient, and whether it has other uses.
        training: the module is in training mode.
        needs_value: a rule asks for the values that belong to gradients.
        inputs: what the module was called with, where a rule asks for that.
    """
    return _RULES(  # type: ignore[no-any-return]
        [tensor for _, tensor, _, _, _ in tensors],
        handle,
        [BETWEEN.join(keys) for keys, _, _, _, _ in tensors],
        [value for _, _, value, _, _ in tensors],
        [gradient for _, _, _, gradient, _ in tensors],
        [branches for _, _, _, _, branches in tensors],
        needs_value,
        [tensor for _, tensor in inputs],
        [BETWEEN.join(keys) for keys, _ in inputs],
        torch.is_grad_enabled(),
        training,
    )


# ---- what runs when a graph runs ------------------------------------------------------------------------------------


@uncompiled
def mark_forward(handle: Tensor, place: int, begins: bool, trains: bool) -> None:
    """Notify a model that its forward begins, or ends. ``place`` is as in :func:`begin_call`."""
    mark = owner_of(handle)
    if mark is not None:
        mark.mark_forward(begins, trains)


@uncompiled
def begin_call(tensors: Sequence[Tensor], handle: Tensor, place: int, trains: bool, training: bool) -> Tensor:
    """Begin a call of a module; returns its run id.

    Args:
        tensors: what is there when the call begins, or ends.
        handle: of the slot.
        place: of this call among those in the graph, so that no two of them are taken for one.
        trains: grad is enabled.
        training: the module is in training mode.
    """
    slot = owner_of(handle)
    call = slot.begin_compiled_call(trains, training) if slot is not None else None
    return _NO_CALL if call is None else _calls.add(call)


@uncompiled
def change_value(value: Tensor, run_id: Tensor, name: str, needs_grad: bool, trains: bool) -> tuple[Tensor, Tensor]:
    """What rules make of a value, and the run id of the graph between.

    Args:
        value: the value.
        run_id: of the call.
        name: of the value.
        needs_grad: a gradient may come back.
        trains: grad is enabled.

    Raises:
        CannotRewriteError: for rules that compute with other tensors that train.
    """
    call = _calls.find(run_id)
    given = value.detach().clone()
    if call is None:
        return given, _UNCHANGED
    with _as_in_eager_code(trains):
        changed = call.change_value(_keys_of(name), given.requires_grad_(needs_grad))
    if changed is given:
        return _as_result(given.requires_grad_(False), value), _UNCHANGED
    if not changed.requires_grad:
        return _as_result(changed, value), _CUT
    _check_graph(changed, given, name)
    return _copy_like(changed.detach(), value), _graphs.add((given, changed))


@uncompiled
def change_value_backward(gradient: Tensor, graph: Tensor) -> Tensor:
    """The gradient of a value, from that of what rules have made of it."""
    found = _graphs.find(graph)
    if not found:
        return gradient.clone() if found is None else torch.zeros_like(gradient)
    given, changed = found
    with _as_in_eager_code(False):
        (through,) = torch.autograd.grad(changed, given, gradient.detach(), retain_graph=True)
    return _as_result(through, gradient)


@uncompiled
def change_gradient(
    gradient: Tensor,
    run_id: Tensor,
    name: str,
    value: Tensor | None,
    inputs: Sequence[Tensor],
    input_names: list[str],
    graphs: Sequence[Tensor],
    is_before: bool,
) -> Tensor:
    """What rules make of a gradient, if it comes together here; see :meth:`CallUnderRules.change_gradient`."""
    call = _calls.find(run_id)
    given = gradient.detach().clone()
    if call is None or not comes_together_at(graphs, is_before):
        return given
    beside = {_keys_of(each): tensor.detach().clone() for each, tensor in zip(input_names, inputs, strict=True)}
    value = value.detach().clone() if value is not None else None
    with _as_in_eager_code(False):
        changed = call.change_gradient(_keys_of(name), given, value, beside)
    return _as_result(changed, gradient)


@contextmanager
def _as_in_eager_code(trains: bool) -> Iterator[None]:
    """Within it autograd works; compiled code runs without. What is saved does not go to a checkpoint around it."""
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        left_out = left_out - torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out):
        if trains and top_pair() is not None:
            with isolated_autograd():
                yield
        else:
            with torch.set_grad_enabled(trains):
                yield


def _keys_of(name: str) -> Keys:
    return tuple(name.split(BETWEEN)) if name else ()


def _check_graph(changed: Tensor, given: Tensor, name: str) -> None:
    """A graph outside of the compiled one would be missed by whoever asks for its gradients."""
    leaves = {node for node in find_nodes(root_edges([changed])).nodes if is_leaf(node)}
    if any(variable_of(leaf) is not given for leaf in leaves):
        raise CannotRewriteError(
            f"A rule at {'.'.join(_keys_of(name))} inside compiled code computes with a tensor that trains.",
            repair="call torch.compiler.disable() on the module, or .detach() the tensor.",
            reason="the graph that was compiled knows nothing of that tensor, and hands no gradient to it.",
        )


def _as_result(changed: Tensor, like: Tensor) -> Tensor:
    """The tensor as the graph takes it: laid out as it expects, in memory that nobody else has."""
    expected = like.stride() if like.is_contiguous() else torch.empty_like(like, device="meta").stride()
    if changed.stride() == expected and type(changed) is Tensor and not is_held_elsewhere(changed):
        return changed
    return _copy_like(changed, like)


def _copy_like(changed: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(like).copy_(changed)


# ---- the operations -------------------------------------------------------------------------------------------------

_RULES = define(
    "rules",
    "(Tensor[] tensors, Tensor handle, str[] names, bool[] values, bool[] gradients, bool[] branches, "
    "bool needs_value, Tensor[] inputs, str[] input_names, bool trains, bool training) -> Tensor[]",
)
_FORWARD = define("forward", "(Tensor handle, bool begins, bool trains) -> ()")
_MARK = define("mark_forward", "(Tensor handle, int place, bool begins, bool trains) -> ()")
_BEGIN = define("begin_call", "(Tensor[] tensors, Tensor handle, int place, bool trains, bool training) -> Tensor")
_VALUE = define(
    "change_value",
    "(Tensor value, Tensor run_id, str name, bool needs_grad, bool trains) -> (Tensor, Tensor)",
)
_BACK = define("change_value_backward", "(Tensor gradient, Tensor graph) -> Tensor")
_GRADIENT = define(
    "change_gradient",
    "(Tensor gradient, Tensor run_id, str name, Tensor? value, Tensor[] inputs, str[] input_names, "
    "Tensor[] graphs, bool is_before) -> Tensor",
)


class ValueRules(torch.autograd.Function):
    """Rules on a value."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, run_id: Tensor, name: str, needs_grad: bool, trains: bool
    ) -> tuple[Tensor, Tensor]:
        """What they make of it, and the run id of the graph between."""
        changed: Tensor
        changed, graph = _VALUE(value, run_id, name, needs_grad, trains)
        save_last_traced(_VALUE)
        ctx.save_for_backward(graph)
        ctx.mark_non_differentiable(graph)
        return changed, graph

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        """Its gradient."""
        return _BACK(gradient, *ctx.saved_tensors), None, None, None, None


_apply_rules: Callable[..., tuple[Tensor, Tensor]] = ValueRules.apply


class OneUse(torch.autograd.Function):
    """One use of a tensor, which has a gradient of its own; torch refuses to write into it, which would bypass this."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """The same elements."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The same gradient."""
        return gradient


_use_once: Callable[..., Tensor] = OneUse.apply


@uncompiled
def _forward(handle: Tensor, begins: bool, trains: bool) -> None:
    """What ``retrograd::forward`` is made of."""
    _MARK(handle, count_traced(_MARK), begins, trains)


@uncompiled
def _rules(
    tensors: Sequence[Tensor],
    handle: Tensor,
    names: Sequence[str],
    values: Sequence[bool],
    gradients: Sequence[bool],
    branches: Sequence[bool],
    needs_value: bool,
    inputs: Sequence[Tensor],
    input_names: Sequence[str],
    trains: bool,
    training: bool,
) -> list[Tensor]:
    """What ``retrograd::rules`` is made of, wherever a graph with it is traced or run."""
    run_id = _BEGIN(tensors, handle, count_traced(_BEGIN), trains, training)
    save_last_traced(_BEGIN)
    teach_inductor()
    results = []
    for place, tensor in enumerate(tensors):
        new = tensor
        is_one_use = gradients[place] and branches[place]
        if values[place]:
            new, graph = _apply_rules(tensor, run_id, names[place], tensor.requires_grad and trains, trains)
            if not is_one_use and not tensor.is_leaf:
                mark_rewritten(new, tensor, graph)
        if gradients[place] and new.requires_grad and trains:
            if new is tensor and (is_one_use or tensor.is_leaf):
                new = branch(tensor, _use_once)
            elif new is tensor and tensor._is_view():  # so that writes are refused; rules act before it, on all uses
                new = _use_once(tensor)
                mark_rewritten(new, tensor, None)
            value = new.detach() if needs_value else None
            for each, graphs, is_before in find_places(new):
                change = partial(_change, run_id, names[place], value, inputs, input_names, graphs, is_before)
                hook_gradient(each, change)
        results.append(new)
    return results


@uncompiled
def _change(
    run_id: Tensor,
    name: str,
    value: Tensor | None,
    inputs: Sequence[Tensor],
    input_names: Sequence[str],
    graphs: Sequence[Tensor],
    is_before: bool,
    gradient: Tensor | None,
) -> Tensor | None:
    if gradient is None:
        return None
    changed: Tensor = _GRADIENT(gradient, run_id, name, value, inputs, input_names, graphs, is_before)
    return changed


def _fake_value(value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(value), new_run_id()


implement(_RULES, _rules)
implement(_FORWARD, _forward)
implement(_MARK, mark_forward, lambda *_: None)
implement(_BEGIN, begin_call, new_run_id)
implement(_VALUE, change_value, _fake_value)
implement(_BACK, change_value_backward, lambda gradient, *_: torch.empty_like(gradient))
implement(_GRADIENT, change_gradient, lambda gradient, *_: torch.empty_like(gradient))

call_plainly(_MARK, mark_forward, numbers_calls=True)
call_plainly(_BEGIN, begin_call, numbers_calls=True)
for _operation, _run in (
    (_VALUE, change_value),
    (_BACK, change_value_backward),
    (_GRADIENT, change_gradient),
):
    call_plainly(_operation, _run)
