"""Record the operations that a node carries out, as a program that does the same again."""

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
from retrograd.following.bundles.copies import MemoryCopier, StoredTensor, TensorCopies, copy_tensors, refuse_opaque
from retrograd.following.bundles.program import (
    BundledOperation,
    Program,
    UnwritableArgumentError,
    describe_error,
    devices_of,
    encode,
    read_random,
)


@dataclass(frozen=True, slots=True)
class RecordedProgram:
    """The record of one run of a node.

    Attributes:
        program: the operations.
        names: of the program's inputs: ``"incoming.0"``, ``"saved.self"``, ``"other.0"``.
        inputs: how these tensors lie in the memory.
        memory: what they held before the node ran.
        random: states of the random generators, device → state: at the beginning, and where operations drew from them.
        outgoing: copies of what the node returned.
        error: what it raised instead.
        is_operations: whether an operation raised it, the last of the program.
    """

    program: Program
    names: tuple[str, ...]
    inputs: tuple[StoredTensor, ...]
    memory: MemoryCopier
    random: tuple[dict[str, Tensor], ...]
    outgoing: TensorCopies
    error: Exception | None = None
    is_operations: bool = False


def record_program(node: Any, incoming: Sequence[Tensor | None], named: Mapping[str, Tensor]) -> RecordedProgram:
    """Run a node once, and record what it does. Tensors that it writes to, and random generators, are put back.

    Args:
        node: the node.
        incoming: what comes in.
        named: names for tensors that it may read.

    Raises:
        FreedGraphError: what it had saved is freed.
        CannotBundleError: it does something that cannot be written down.
    """
    devices = devices_of([*incoming, *named.values()])
    recorder = _ProgramRecorder(named, devices)
    gradients = [None if each is None else each.detach() for each in incoming]
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            recorder.add_input(gradient, f"incoming.{index}")
    with ExitStack() as stack:
        stack.callback(recorder.memory.restore)
        stack.enter_context(random_kept())
        stack.enter_context(plain_torch())
        return recorder.record(node, gradients)


class _ProgramRecorder:
    """Gives numbers to tensors as they turn up.

    Args:
        named: names for tensors that may turn up.
        devices: whose random generators may matter.
    """

    def __init__(self, named: Mapping[str, Tensor], devices: Sequence[str]) -> None:
        self.memory = MemoryCopier()
        self._devices = devices
        self._names_by_place = {place: name for name, tensor in named.items() if (place := _place_of(tensor))}
        self._names_by_memory = {place[0]: name for place, name in self._names_by_place.items()}
        self._names: list[str] = []
        self._inputs: list[StoredTensor] = []
        self._input_numbers: list[int] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []  # an id stands for a tensor while that is alive
        self._made: dict[int, Tensor] = {}  # memory → a result that lies in it
        self._operations: list[BundledOperation] = []
        self._random = [read_random(devices)]
        self._refusal: CannotBundleError | None = None

    def record(self, node: Any, incoming: Sequence[Tensor | None]) -> RecordedProgram:
        outgoing: tuple[Tensor | None, ...] = ()
        failure: Exception | None = None
        try:
            with OperationTap(self._carry_out):
                outgoing = run_node(node, incoming)
            _check_result(outgoing)
            outputs = [None if each is None else self._number_of(each) for each in outgoing]
        except CannotBundleError:
            raise
        except Exception as error:
            if self._refusal is None and "second time" in str(error):
                raise
            failure, outputs = error, []
        if self._refusal is not None:
            raise self._refusal
        return RecordedProgram(
            self._finish(outputs),
            tuple(self._names),
            tuple(self._inputs),
            self.memory,
            tuple(self._random),
            copy_tensors(outgoing),
            failure,
            is_operations=failure is not None and self._is_last_error(failure),
        )

    def add_input(self, tensor: Tensor, name: str) -> int:
        stored = self.memory.store(tensor)
        self._inputs.append(stored)
        self._names.append(name)
        number = self._give_number(tensor)
        self._input_numbers.append(number)
        return number

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
            self._operations.append(replace(described, result=encode(result, self._number_result)))
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
            written = encode([list(args), list(kwargs.values())], self._number_of)
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

    def _number_of(self, tensor: Tensor) -> int:
        """The number of a tensor that is read. One never seen before is an input."""
        if (number := self._numbers.get(id(tensor))) is not None:
            return number
        refuse_opaque(tensor)
        place = _place_of(tensor)
        if place and place[0] in self._made and not self.memory.holds(tensor):
            return self._number_view(tensor, self._made[place[0]])
        return self.add_input(tensor, self._name_of(place))

    def _number_result(self, tensor: Tensor) -> int:
        refuse_opaque(tensor)
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._give_number(tensor)
        if (place := _place_of(tensor)) and not tensor.is_conj() and not tensor.is_neg():
            self._made.setdefault(place[0], tensor)
        return number

    def _number_view(self, tensor: Tensor, made: Tensor) -> int:
        """The number of a tensor that autograd made out of a result without an operation."""
        if tensor.dtype is not made.dtype or tensor.is_conj() or tensor.is_neg():
            raise _refuse("autograd", "reads a result of its own in another form")
        source, number = {"tensor": self._numbers[id(made)]}, self._give_number(tensor)
        where = (list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset()))
        self._operations.append(BundledOperation("aten::as_strided", (source, *where), {}, {"tensor": number}))
        return number

    def _give_number(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        number = self._numbers[id(tensor)] = len(self._kept) - 1
        return number

    def _name_of(self, place: tuple[Any, ...] | None) -> str:
        name = None
        if place is not None:
            name = self._names_by_place.get(place) or self._names_by_memory.get(place[0])
        name = name or f"other.{sum(each.startswith('other.') for each in self._names)}"
        again = sum(each == name or each.startswith(f"{name}#") for each in self._names)
        return f"{name}#{again + 1}" if again else name

    def _keep_random(self) -> int:
        self._random.append(read_random(self._devices))
        return len(self._random) - 1

    def _finish(self, outputs: Sequence[int | None]) -> Program:
        """The program, with the inputs numbered before the results."""
        order = [*self._input_numbers, *sorted(set(range(len(self._kept))) - set(self._input_numbers))]
        new = {old: number for number, old in enumerate(order)}
        operations = tuple(
            replace(
                each,
                args=tuple(_renumber(list(each.args), new)),
                kwargs={name: _renumber(value, new) for name, value in each.kwargs.items()},
                result=_renumber(each.result, new),
            )
            for each in self._operations
        )
        return Program(len(self._inputs), operations, tuple(None if each is None else new[each] for each in outputs))

    def _is_last_error(self, failure: Exception) -> bool:
        return bool(self._operations) and self._operations[-1].raises == describe_error(failure)


def _place_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """The memory of a tensor, and how the tensor lies in it; None where it has none."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        memory = memory_of(tensor)
    except (RuntimeError, NotImplementedError):
        return None
    return memory, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _renumber(data: Any, new: Mapping[int, int]) -> Any:
    match data:
        case {"tensor": number}:
            return {"tensor": new[number]}
        case {"tuple": parts}:
            return {"tuple": _renumber(parts, new)}
        case list():
            return [_renumber(part, new) for part in data]
        case _:
            return data


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
