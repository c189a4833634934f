"""A program: operations one after the other, as plain data that any process can run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from retrograd.bundles.arguments import bind, decode
from retrograd.bundles.guard import Guard, refuse_unlisted
from retrograd.errors import ReplayError, UnsafeBundleError
from retrograd.hooks.dispatch import below_autograd, find_operation

_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.\w+)?")


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception as text.

    Attributes:
        kind: its class, as in ``"RuntimeError"``; with the module where it is not one of Python's own.
        text: its message.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True, slots=True)
class BundledOperation:
    """One call of an operation of torch.

    Attributes:
        name: as in ``"aten::add.Tensor"``.
        args, kwargs: the arguments, as :func:`retrograd.bundles.arguments.encode` writes them.
        result: what it returns, likewise: says which tensors of the result get which numbers.
        random: which state of the random generators it starts from; None where it draws nothing.
        raises: what it raised instead.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None
    random: int | None = None
    raises: Raised | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """Operations in order. Tensors go by numbers: first those of the inputs, then those of results.

    Attributes:
        inputs: how many tensors there must be before it can run; they are numbered from 0.
        operations: what to do.
        outputs: numbers of the tensors that it returns; None where it returns none.
    """

    inputs: int
    operations: tuple[BundledOperation, ...]
    outputs: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of running a program.

    Attributes:
        outputs: what it returned; empty where an operation raised.
        error: what was raised; None where all went well.
        stopped_at: which operation raised, or did not raise what was recorded.
    """

    outputs: tuple[Tensor | None, ...]
    error: Exception | None = None
    stopped_at: int | None = None


def describe_error(error: BaseException) -> Raised:
    """An exception as text that can be compared."""
    kind = type(error)
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return Raised(home + kind.__qualname__, str(error))


def run_program(
    program: Program, inputs: Sequence[Tensor], set_random: Callable[[int], None], guard: Guard | None = None
) -> Ran:
    """Run a program.

    Args:
        program: what to run.
        inputs: a tensor for each of the program's inputs; some programs write to them.
        set_random: sets the random generators to one of the states that were recorded.
        guard: looks at each operation before it is carried out; None for a program that is trusted.

    Raises:
        ReplayError: this process does not know one of the operations.
        UnsafeBundleError: the guard lets one of them not pass.
    """
    found = {operation.name: _find(operation.name) for operation in program.operations}
    if guard is not None:
        for name, carry_out in found.items():
            refuse_unlisted(name, carry_out)
    tensors = dict(enumerate(inputs))
    with below_autograd():
        for index, operation in enumerate(program.operations):
            if operation.random is not None:
                set_random(operation.random)
            try:
                args = [decode(value, tensors) for value in operation.args]
                kwargs = {name: decode(value, tensors) for name, value in operation.kwargs.items()}
                if guard is not None:
                    guard.check(operation.name, found[operation.name], args, kwargs)
                result = found[operation.name](*args, **kwargs)
            except UnsafeBundleError:
                raise
            except Exception as error:
                went_on = operation.raises is not None and index + 1 < len(program.operations)
                if went_on and describe_error(error) == operation.raises:
                    continue  # the code that was recorded caught it
                return Ran((), error, index)
            if operation.raises is not None:
                return Ran((), None, index)
            bind(operation.result, result, tensors)
    return Ran(tuple(None if number is None else tensors.get(number) for number in program.outputs))


def check_program(program: Program) -> None:
    """Check that a program uses no tensor before there is one.

    Raises:
        ValueError: it does, or something in it is none of what :func:`retrograd.bundles.arguments.encode` writes.
        KeyError: likewise.
    """
    known: dict[int, Any] = dict.fromkeys(range(program.inputs))
    for operation in program.operations:
        if not _NAME.fullmatch(operation.name):
            raise ValueError(f"{operation.name!r} is not a name of an operation")
        for value in (*operation.args, *operation.kwargs.values()):
            decode(value, known)
        _bind_all(operation.result, known)
    if missing := {number for number in program.outputs if number is not None} - known.keys():
        raise KeyError(f"no operation makes the tensors {sorted(missing)}")


def _bind_all(form: Any, known: dict[int, Any]) -> None:
    match form:
        case {"tensor": int(number)}:
            known[number] = None
        case list(parts) | {"tuple": list(parts)}:
            for part in parts:
                _bind_all(part, known)
        case _:
            decode(form, known)


def _find(name: str) -> Any:
    operation = find_operation(name)
    if operation is None:
        namespace = name.partition("::")[0]
        raise ReplayError(
            f"This process does not know the operation {name}.",
            repair=f"import the module that registers the operations of {namespace!r}, then replay again."
            if namespace != "aten"
            else "replay with the version of torch that wrote the bundle.",
            reason="a bundle names the operations that a node carried out; it does not hold their code.",
        )
    return operation
