"""Record the operations that a node carries out, so that they can be carried out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from retrograd.core.errors import CannotBundleError
from retrograd.core.hooks.dispatch import (
    OperationTap,
    is_operation,
    is_random,
    leaf_being_added_to,
    memory_of,
    plain_torch,
    written_arguments,
)
from retrograd.core.hooks.nodes import run_node
from retrograd.core.randomness import random_kept
from retrograd.following.bundles.copies import MemoryCopier, StoredTensor, TensorCopies, refuse_opaque
from retrograd.following.bundles.program import BundledOperation, UnwritableArgumentError, describe_error, encode


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The record of one run of a node.

    Attributes:
        operations: what it carried out.
        outputs: which tensors it returned.
        inputs: how the tensors that the operations read lie in the memory.
        memory: what they held before the node ran, and states of random generators.
        random: names of these states by device: at the beginning, and where operations drew from them.
        outgoing: copies of what it returned.
        error: what it raised instead.
        is_operations: whether an operation raised it, the last of them.
    """

    operations: tuple[BundledOperation, ...]
    outputs: tuple[str | int | None, ...]
    inputs: tuple[StoredTensor, ...]
    memory: MemoryCopier
    random: tuple[dict[str, str], ...]
    outgoing: TensorCopies
    error: Exception | None = None
    is_operations: bool = False


def record_run(node: Any, incoming: Sequence[Tensor | None], named: Mapping[str, Tensor]) -> RecordedRun:
    """Run a node once, and record what it does. Tensors that it writes to, and random generators, are put back.

    Args:
        node: the node; None for one that returns what comes in.
        incoming: what comes in.
        named: names for tensors that it may read.

    Raises:
        FreedGraphError: what it had saved is freed.
        CannotBundleError: it does something that cannot be written down.
    """
    recorder = _RunRecorder(named, incoming)
    gradients = [None if each is None else each.detach() for each in incoming]
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            recorder.add_input(gradient, f"incoming.{index}")
    with ExitStack() as stack:
        stack.callback(recorder.memory.restore)
        stack.enter_context(random_kept())
        stack.enter_context(plain_torch())
        return recorder.record(node, gradients)


class _RunRecorder:
    """Names tensors as they turn up: inputs by names, results by numbers.

    Args:
        named: names for tensors that may turn up.
        incoming: what comes in.
    """

    def __init__(self, named: Mapping[str, Tensor], incoming: Sequence[Tensor | None]) -> None:
        self.memory = MemoryCopier()
        tensors = [*named.values(), *(each for each in incoming if each is not None)]
        self._devices = sorted({str(each.device) for each in tensors if each.is_cuda})
        self._names_by_place = {place: name for name, tensor in named.items() if (place := _place_of(tensor))}
        self._names_by_memory = {place[0]: name for place, name in self._names_by_place.items()}
        self._inputs: list[StoredTensor] = []
        self._names: dict[int, str | int] = {}
        self._kept: list[Tensor] = []  # an id stands for a tensor while that is alive
        self._made: dict[int, Tensor] = {}  # memory → a result that lies in it
        self._operations: list[BundledOperation] = []
        self._random: list[dict[str, str]] = []
        self._keep_random()
        self._refusal: CannotBundleError | None = None

    def record(self, node: Any, incoming: Sequence[Tensor | None]) -> RecordedRun:
        outgoing: tuple[Tensor | None, ...] = ()
        outputs: tuple[str | int | None, ...] = ()
        failure: Exception | None = None
        try:
            with OperationTap(self._carry_out):
                outgoing = tuple(incoming) if node is None else run_node(node, incoming)
            _check_result(outgoing)
            outputs = tuple(None if each is None else self._name_of(each) for each in outgoing)
        except CannotBundleError:
            raise
        except Exception as error:
            if self._refusal is None and "second time" in str(error):
                raise
            failure = error
        if self._refusal is not None:
            raise self._refusal
        operations = self._operations
        raised = operations[-1].raises if operations else None
        return RecordedRun(
            tuple(operations),
            outputs,
            tuple(self._inputs),
            self.memory,
            tuple(self._random),
            TensorCopies(outgoing, "outgoing"),
            failure,
            is_operations=failure is not None and raised == describe_error(failure),
        )

    def add_input(self, tensor: Tensor, name: str) -> str:
        self._inputs.append(self.memory.store(tensor, name))
        self._give_name(tensor, name)
        return name

    def _carry_out(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            described = self._describe(operation, args, kwargs)
        except CannotBundleError as error:
            self._refusal = error  # the user's code may catch it
            raise
        try:
            result = operation(*args, **kwargs)
        except Exception as error:
            self._operations.append(replace(described, raises=describe_error(error)))
            raise
        try:
            self._operations.append(replace(described, result=encode(result, self._name_result)))
        except (CannotBundleError, UnwritableArgumentError) as error:
            self._refusal = _refuse(str(operation), f"returns {error}")
            raise self._refusal from error
        return result

    def _describe(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BundledOperation:
        """An operation before it is carried out: it may write to its arguments."""
        _refuse_leaf()
        if not is_operation(operation):
            raise _refuse(str(operation), "takes functions as arguments")
        name = str(operation.name())
        if "c10d" in name or name.startswith("symm_mem::"):
            raise _refuse(name, "talks to other processes, which would wait for this one", "")
        try:
            written = encode([list(args), list(kwargs.values())], self._name_of)
        except UnwritableArgumentError as error:
            raise _refuse(name, f"takes {error}") from error
        for argument in written_arguments(operation, args, kwargs):
            for tensor in argument if isinstance(argument, list | tuple) else [argument]:
                if isinstance(tensor, Tensor):
                    self.memory.will_write(tensor)
        if "as_strided" in name:  # it sees more of the memory than its argument shows
            self.memory.cover(args[0])
        state = self._keep_random() if is_random(operation) else None
        return BundledOperation(name, tuple(written[0]), dict(zip(kwargs, written[1], strict=True)), random=state)

    def _name_of(self, tensor: Tensor) -> str | int:
        """The name of a tensor that is read. One never seen before is an input."""
        if (name := self._names.get(id(tensor))) is not None:
            return name
        refuse_opaque(tensor)
        place = _place_of(tensor)
        if place and place[0] in self._made and not self.memory.holds(tensor):
            return self._name_view(tensor, self._made[place[0]])
        return self.add_input(tensor, self._choose_name(place))

    def _name_result(self, tensor: Tensor) -> str | int:
        refuse_opaque(tensor)
        name = self._names.get(id(tensor))
        if name is None:
            name = self._give_name(tensor, len(self._kept))
        if (place := _place_of(tensor)) and not tensor.is_conj() and not tensor.is_neg():
            self._made.setdefault(place[0], tensor)
        return name

    def _name_view(self, tensor: Tensor, made: Tensor) -> str | int:
        """The name of a tensor that autograd made out of a result without an operation."""
        if tensor.dtype is not made.dtype or tensor.is_conj() or tensor.is_neg():
            raise _refuse("autograd", "reads a result of its own in another form")
        source, name = {"tensor": self._names[id(made)]}, self._give_name(tensor, len(self._kept))
        where = (list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset()))
        self._operations.append(BundledOperation("aten::as_strided", (source, *where), {}, {"tensor": name}))
        return name

    def _give_name(self, tensor: Tensor, name: str | int) -> str | int:
        self._kept.append(tensor)
        self._names[id(tensor)] = name
        return name

    def _choose_name(self, place: tuple[Any, ...] | None) -> str:
        taken = [each.name for each in self._inputs]
        name = None
        if place is not None:
            name = self._names_by_place.get(place) or self._names_by_memory.get(place[0])
        name = name or f"other.{sum(each.startswith('other.') for each in taken)}"
        again = sum(each == name or each.startswith(f"{name}#") for each in taken)
        return f"{name}#{again + 1}" if again else name

    def _keep_random(self) -> int:
        number = len(self._random)
        names = {device: f"random.{number}.{device}" for device in ("cpu", *self._devices)}
        self.memory.entries[names["cpu"]] = torch.get_rng_state()
        self.memory.entries |= {names[device]: torch.cuda.get_rng_state(device) for device in self._devices}
        self._random.append(names)
        return number


def _place_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """The memory of a tensor, and how the tensor lies in it; None where it has none."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        memory = memory_of(tensor)
    except (RuntimeError, NotImplementedError):
        return None
    return memory, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _refuse_leaf() -> None:
    if leaf_being_added_to() is not None:
        raise CannotBundleError(
            "The node runs a backward pass of its own that adds to the .grad of leaves.",
            repair="use torch.utils.checkpoint with use_reentrant=False, or torch.autograd.grad inside of a Function.",
            reason="what it adds would count twice.",
        )


def _refuse(what: str, does: str, which: str = ", which cannot be written down") -> CannotBundleError:
    return CannotBundleError(
        f"{what} {does}{which}.",
        repair="run the node again in this process with rg.rerun.",
        reason="a bundle holds tensors, numbers and names of operations only, so that any process can run it.",
    )


def _check_result(outgoing: Sequence[Any]) -> None:
    wrong = next((each for each in outgoing if each is not None and not isinstance(each, Tensor)), None)
    if wrong is not None:
        raise CannotBundleError(
            f"The backward has returned {type(wrong).__name__}, which is not a gradient.",
            repair="return a tensor, or None, for each argument of the forward.",
        )
