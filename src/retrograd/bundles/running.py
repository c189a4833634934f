"""Run the program of a bundle, and tell how what comes out differs from what the node gave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from retrograd.bundles.contents import Bundle
from retrograd.bundles.copies import Copies, same_bits
from retrograd.bundles.files import damaged
from retrograd.bundles.guard import Guard, check_stored
from retrograd.bundles.program import Ran, describe_error, run_program
from retrograd.bundles.switches import set_random, switched
from retrograd.errors import ReplayError
from retrograd.hooks.dispatch import plain_torch
from retrograd.randomness import random_kept

_CANNOT_BE_MADE = (RuntimeError, AssertionError, TypeError, ValueError, OverflowError, AttributeError, ImportError)
"""What torch raises where a tensor has a shape, dtype or device that it cannot have here."""


def run_bundle(bundle: Bundle, incoming: Sequence[Tensor | None] | None = None, *, trusted: bool = False) -> Ran:
    """Run the program of a bundle, from the random state and with the switches of then; those of now are put back.

    Args:
        bundle: holds the program.
        incoming: other gradients than those in the bundle.
        trusted: whether to carry out whatever it names, with whatever sizes and indices.

    Raises:
        DamagedBundleError: its tensors, or its states of random generators, are none.
        ReplayError: this process lacks an operation or a device, or the gradients do not fit.
        UnsafeBundleError: it is not trusted, and may do harm.
    """
    guard = None if trusted else _guard(bundle)
    with ExitStack() as stack:
        stack.enter_context(plain_torch())
        inputs = _rebuild_inputs(bundle)
        if incoming is not None:
            _replace(bundle, inputs, incoming)
        stack.enter_context(random_kept())
        stack.enter_context(switched(bundle.switches))
        _set_random(bundle, 0)
        return run_program(bundle.program, inputs, partial(_set_random, bundle), guard)


def rebuild_outgoing(bundle: Bundle) -> tuple[Tensor | None, ...]:
    """What the node gave when the bundle was written.

    Raises:
        DamagedBundleError: it cannot be made.
    """
    try:
        return bundle.outgoing.rebuild()
    except _CANNOT_BE_MADE as error:
        raise damaged(bundle.path, f"the tensors that came out cannot be made: {error}") from error


def _guard(bundle: Bundle) -> Guard:
    stored = bundle.inputs.stored_bytes() + bundle.outgoing.stored_bytes()
    for copies in (bundle.inputs, bundle.outgoing):
        check_stored(copies, stored)
    return Guard(stored)


def _set_random(bundle: Bundle, number: int) -> None:
    try:
        set_random(bundle.random[number])
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise damaged(bundle.path, f"a state of the random generators is none: {error}") from error


def find_differences(bundle: Bundle, ran: Ran) -> list[str]:
    """How a run differs from that of the node; empty where it does not."""
    failure, operations = bundle.node.failure, bundle.program.operations
    if ran.stopped_at is not None:
        where = f"operation {ran.stopped_at} ({operations[ran.stopped_at].name})"
        expected = operations[ran.stopped_at].raises
        if ran.error is None:
            return [f"{where} did not raise {expected}"]
        raised = describe_error(ran.error)
        return [] if raised == expected else [f"{where} raised {raised}{f', not {expected}' if expected else ''}"]
    if failure is not None:
        return [] if failure.by != "operation" else [f"nothing raised {failure.error}"]
    expected_tensors = rebuild_outgoing(bundle)
    return list(_compare_all(ran.outputs, expected_tensors))


def find_deviation(recorded: Copies, real: Copies) -> str:
    """How what a node gave while its operations were recorded differs from what it gives otherwise."""
    return next(_compare_all(recorded.rebuild(), real.rebuild()), "")


def _compare_all(outputs: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> Iterator[str]:
    for index, (one, other) in enumerate(zip(outputs, expected, strict=True)):
        if one is None or other is None:
            if one is not other:
                yield f"outgoing {index}: {_name(one)} instead of {_name(other)}"
        elif not same_bits(one, other):
            yield f"outgoing {index}: {_compare(one, other)}"


def _compare(one: Tensor, other: Tensor) -> str:
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return f"{_name(one)} instead of {_name(other)}"
    if one.layout is not torch.strided:
        return "the indices or values differ"
    one, other = one.detach().cpu(), other.detach().cpu()
    if one.dtype is torch.bool:
        return f"{int((one != other).sum())} of {one.numel()} elements differ"
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    is_same = (one == other) | (one.isnan() & other.isnan())
    gap = torch.where(is_same, 0.0, (one - other).abs())
    count = int((~is_same).sum())
    if not count:
        return "signs of zeros, or bits of NaN, differ"
    return f"{count} of {one.numel()} elements differ, by at most {gap.max().item():.3g}"


def _name(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    layout = "" if tensor.layout is torch.strided else f" ({str(tensor.layout).removeprefix('torch.')})"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{layout}"


def _rebuild_inputs(bundle: Bundle) -> list[Tensor]:
    try:
        return [tensor for tensor in bundle.inputs.rebuild() if tensor is not None]
    except _CANNOT_BE_MADE as error:
        devices = sorted({block.device for block in bundle.inputs.blocks})
        raise ReplayError(
            f"The tensors of this bundle cannot be made here: {error}.",
            repair=f"replay it on a machine that has the device {', '.join(devices)}.",
        ) from error


def _replace(bundle: Bundle, inputs: list[Tensor], incoming: Sequence[Tensor | None]) -> None:
    """Put other gradients in the places of those that came in."""
    came = bundle.node.incoming
    if [each is None for each in incoming] != [each is None for each in came]:
        wanted = ", ".join("None" if each is None else str(each.tensor) for each in came)
        raise ReplayError(
            f"These are not the gradients that {bundle.node.name} took: it took ({wanted}).",
            repair="give as many, and None in the same places.",
            reason="the operations of a bundle are those that were carried out for such gradients.",
        )
    for index, gradient in enumerate(incoming):
        if gradient is None:
            continue
        place = bundle.names.index(f"incoming.{index}")
        old = inputs[place]
        if bundle.node.failure is None and (gradient.shape, gradient.dtype) != (old.shape, old.dtype):
            raise ReplayError(
                f"The gradient {index} is {_name(gradient)}, but {_name(old)} came in.",
                repair="give one of the same shape and dtype.",
            )
        inputs[place] = gradient.detach().to(old.device, copy=True)
