"""Run the node of a replay bundle again, in any process, and compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from retrograd.core.amounts import count_of
from retrograd.core.errors import BundleVersionError, ReplayError, UntrustedBundleError
from retrograd.core.foreign.text import show_plainly
from retrograd.core.hooks.dispatch import plain_torch
from retrograd.core.randomness import random_kept
from retrograd.following.bundles.bundle import Bundle, describe_bundle, open_bundle
from retrograd.following.bundles.copies import rebuild, same_bits
from retrograd.following.bundles.files import damaged
from retrograd.following.bundles.program import Ran, describe_error, run_operations, set_random, switched
from retrograd.following.graph.walker import describe


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """The outcome of running the node of a bundle again; true where it is the same as before.

    Attributes:
        bundle: what was run.
        outputs: the gradients that it gave; empty where it raised.
        expected: those that it gave when the bundle was written.
        equal: whether they are the same bit for bit, or the same exception was raised; None where there is nothing to
            compare: other gradients came in, or the exception came from code that is not in the bundle.
        error: the exception that was raised.
        differences: what is not the same, or was not compared, a line each.
    """

    bundle: Bundle
    outputs: tuple[Tensor | None, ...]
    expected: tuple[Tensor | None, ...]
    equal: bool | None
    error: Exception | None
    differences: list[str]

    def __bool__(self) -> bool:
        return self.equal is True

    def __str__(self) -> str:
        return show_plainly("\n".join(_describe(self)))

    def __repr__(self) -> str:
        outcome = {True: "the same", False: "not the same", None: "not compared"}[self.equal]
        return f"<Replayed {self.bundle.node.place}: {outcome}>"


def replay(
    bundle: Bundle | str | Path,
    *,
    incoming: Sequence[Tensor | None] | None = None,
    strict: bool = True,
    trust: bool = False,
) -> Replayed:
    """Run the node of a bundle again, and compare what it gives with what it gave, bit for bit.

    Neither the model nor its code is needed, but custom operations must be registered. The random generators and
    switches of torch are as before when this returns.

    Args:
        bundle: a bundle, or its folder.
        incoming: other gradients to run it with; then nothing is compared. Numbers that the node's code has read out of
            the gradients (``.item()``, sizes) stay those of the recorded run.
        strict: whether to refuse a bundle that another version of torch has written.
        trust: whether to run a bundle that this user has not written, or that was changed since. It can call any
            operation that is registered with torch in this process, with any arguments, so trust it as a program:
            :func:`open_bundle` shows what it names, and runs nothing.

    Raises:
        DamagedBundleError: the bundle cannot be read.
        BundleVersionError: another version of torch has written it.
        UntrustedBundleError: it is not signed by this user, and ``trust`` is False.
        ReplayError: this process lacks an operation or a device, or the gradients do not fit.
    """
    if not isinstance(bundle, Bundle):
        bundle = open_bundle(bundle)
    _refuse_untrusted(bundle, trust=trust)
    _refuse_version(bundle, strict=strict)
    ran = run_bundle(bundle, incoming)
    expected = rebuild_outgoing(bundle)
    if incoming is not None:
        notes = []
        if bundle.node.failure is not None and ran.error is None:
            what = f"what would have come after {len(bundle.operations)} operations is not known"
            notes = [f"{bundle.node.name} raised when it was recorded: {what}"]
        return Replayed(bundle, ran.outputs, expected, None, ran.error, notes)
    differences = find_differences(bundle, ran)
    equal: bool | None = not differences
    if differences and bundle.node.deviation:
        differences.append("torch takes another formula for this node while its operations are recorded")
    failure = bundle.node.failure
    if equal and failure is not None and failure.by != "operation":
        differences, equal = [_say_not_raised(bundle)], None
    return Replayed(bundle, ran.outputs, expected, equal, ran.error, differences)


def _refuse_untrusted(bundle: Bundle, *, trust: bool) -> None:
    if bundle.doubt and not trust:
        raise UntrustedBundleError(
            f"The bundle {bundle.path} may not be your own: {bundle.doubt}.",
            repair="see what it holds: `retrograd replay --show`, or rg.open_bundle(path). If you would run a program "
            "of whoever wrote it, replay it with trust=True, or `retrograd replay --trust`.",
            reason="to replay is to call the operations that it names with the inputs that it holds. These can be any "
            "that are registered with torch in this process, with any arguments: also such as read and write files, or "
            "crash the process.",
        )


def _refuse_version(bundle: Bundle, *, strict: bool) -> None:
    written_with = bundle.versions.torch
    if strict and written_with != torch.__version__:
        raise BundleVersionError(
            f"The bundle {bundle.path} was written with torch {written_with}; this is torch {torch.__version__}.",
            repair="replay it with that version, or with strict=False.",
            reason="between versions of torch operations change, and give other bits.",
        )


def _describe(replayed: Replayed) -> Iterator[str]:
    yield from describe_bundle(replayed.bundle)
    yield from (f"  went out {place}: {_say_output(replayed, place)}" for place in range(len(replayed.outputs)))
    if replayed.error is not None:
        yield f"  raised now {type(replayed.error).__name__}: {replayed.error}"
    yield {True: "The same.", False: "Not the same.", None: "Not compared."}[replayed.equal]
    yield from (f"  {each}" for each in replayed.differences)


def _say_output(replayed: Replayed, index: int) -> str:
    output = replayed.outputs[index]
    if output is None:
        return "None"
    text = str(describe(output))
    start = f"outgoing {index}: "
    found = [each.removeprefix(start) for each in replayed.differences if each.startswith(start)]
    if found or replayed.equal is None:
        return f"{text}, {found[0]}" if found else text
    return f"{text}, the same"


def _say_not_raised(bundle: Bundle) -> str:
    failure = bundle.node.failure
    assert failure is not None
    code = "Python code" if failure.by == "Python" else "autograd itself"
    return f"raised by {code}, not by an operation: {failure.error}\n{failure.traceback}".rstrip()


# ---- running ----

_NOT_VALID = (
    RuntimeError,
    AssertionError,
    TypeError,
    ValueError,
    LookupError,
    OverflowError,
    AttributeError,
    ImportError,
)
"""Errors of torch where a tensor, a state or a switch is one that cannot be here, or of what nobody has written."""


def run_bundle(bundle: Bundle, incoming: Sequence[Tensor | None] | None = None) -> Ran:
    """Run the operations of a bundle, from the random state and with the switches of then; those of now are put back.

    Args:
        bundle: what to run; it is trusted.
        incoming: other gradients than those in the bundle.

    Raises:
        DamagedBundleError: something in it is not valid.
        ReplayError: this process lacks an operation or a device, or the gradients do not fit.
    """
    with ExitStack() as stack:
        stack.enter_context(plain_torch())
        inputs = _rebuild_inputs(bundle)
        if incoming is not None:
            _replace(bundle, inputs, incoming)
        stack.enter_context(random_kept())
        try:
            stack.enter_context(switched(bundle.switches))
            _set_random(bundle, 0)
            return run_operations(bundle.operations, bundle.outputs, inputs, partial(_set_random, bundle))
        except ReplayError:
            raise
        except _NOT_VALID as error:
            raise damaged(bundle.path, f"it cannot be run: {type(error).__name__}: {error}") from error


def rebuild_outgoing(bundle: Bundle) -> tuple[Tensor | None, ...]:
    """Make the gradients that the node gave when the bundle was written.

    Raises:
        DamagedBundleError: it cannot be made.
    """
    try:
        return rebuild(bundle.outgoing, bundle.blocks, bundle.entries)
    except _NOT_VALID as error:
        raise damaged(bundle.path, f"the tensors that came out cannot be made: {error}") from error


def _set_random(bundle: Bundle, number: int) -> None:
    set_random({device: bundle.entries[name] for device, name in bundle.random[number].items()})


def find_differences(bundle: Bundle, ran: Ran) -> list[str]:
    """Compare a run with that of the node; returns a sentence for each difference."""
    failure, operations = bundle.node.failure, bundle.operations
    if ran.stopped_at is not None:
        where = f"operation {ran.stopped_at} ({operations[ran.stopped_at].name})"
        expected = operations[ran.stopped_at].raises
        if ran.error is None:
            return [f"{where} did not raise {expected}"]
        raised = describe_error(ran.error)
        return [] if raised == expected else [f"{where} raised {raised}{f', not {expected}' if expected else ''}"]
    if failure is not None:
        return [] if failure.by != "operation" else [f"nothing raised {failure.error}"]
    return list(compare_all(ran.outputs, rebuild_outgoing(bundle)))


def compare_all(outputs: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> Iterator[str]:
    """Compare gradients bit for bit; gives a sentence for each that differs."""
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
        return f"{int((one != other).sum())} of {count_of(one.numel(), 'element')} differ"
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    is_same = (one == other) | (one.isnan() & other.isnan())
    gap = torch.where(is_same, 0.0, (one - other).abs())
    count = int((~is_same).sum())
    if not count:
        return "signs of zeros, or bits of NaN, differ"
    return f"{count} of {count_of(one.numel(), 'element')} differ, by at most {gap.max().item():.3g}"


def _name(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    layout = "" if tensor.layout is torch.strided else f" ({str(tensor.layout).removeprefix('torch.')})"
    return f"{describe(tensor)}{layout}"


def _rebuild_inputs(bundle: Bundle) -> dict[str, Tensor]:
    try:
        made = rebuild(bundle.inputs, bundle.blocks, bundle.entries)
    except _NOT_VALID as error:
        devices = sorted({block.device for block in bundle.blocks.values()})
        raise ReplayError(
            f"The tensors of this bundle cannot be made here: {error}.",
            repair=f"replay it on a machine that has the device {', '.join(devices)}.",
        ) from error
    return {stored.name: tensor for stored, tensor in zip(bundle.inputs, made, strict=True) if tensor is not None}


def _replace(bundle: Bundle, inputs: dict[str, Tensor], incoming: Sequence[Tensor | None]) -> None:
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
        name = f"incoming.{index}"
        old = inputs[name]
        if bundle.node.failure is None and (gradient.shape, gradient.dtype) != (old.shape, old.dtype):
            raise ReplayError(
                f"The gradient {index} is {_name(gradient)}, but {_name(old)} came in.",
                repair="give one of the same shape and dtype.",
            )
        inputs[name] = gradient.detach().to(old.device, copy=True)
