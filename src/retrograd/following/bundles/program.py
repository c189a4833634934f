"""A program: operations one after the other, as plain data that any process can run.

Its arguments are in the terms of JSON, where tensors go by numbers. Beside them its results depend on random generators
and on switches of torch.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retrograd.core.errors import ReplayError, UnsafeBundleError
from retrograd.core.hooks.dispatch import below_autograd, find_operation
from retrograd.following.bundles.guard import CallGuard, refuse_unlisted

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
    """A call of an operation of torch.

    Attributes:
        name: as in ``"aten::add.Tensor"``.
        args, kwargs: the arguments, as :func:`retrograd.following.bundles.program.encode` writes them.
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
    """The outcome of running a program.

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
    program: Program, inputs: Sequence[Tensor], set_random: Callable[[int], None], guard: CallGuard | None = None
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
        ValueError: it does, or something in it is not of what
            :func:`retrograd.following.bundles.program.encode` writes.
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


# ---- arguments ----

_NAMED = (torch.dtype, torch.layout, torch.memory_format)
"""Kinds of argument that are constants of torch, written by their names."""


_SPECIAL = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


class UnwritableArgumentError(TypeError):
    """An argument of an operation cannot be written down."""


def encode(value: Any, number_of: Callable[[Tensor], int]) -> Any:
    """An argument or result of an operation in the terms of JSON.

    Args:
        value: the argument or result.
        number_of: gives the number of a tensor.

    Raises:
        UnwritableArgumentError: for things that live in this process alone.
    """
    match value:
        case None | bool() | str():
            return value
        case int() | torch.SymInt():
            return int(value)
        case float() | torch.SymFloat():
            return _encode_float(float(value))
        case complex():
            return {"complex": [_encode_float(value.real), _encode_float(value.imag)]}
        case Tensor():
            return {"tensor": number_of(value)}
        case torch.Size() | list():
            return [encode(part, number_of) for part in value]
        case tuple():
            return {"tuple": [encode(part, number_of) for part in value]}
        case torch.device():
            return {"device": str(value)}
        case _ if isinstance(value, _NAMED):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        case _:
            raise UnwritableArgumentError(f"a {type(value).__module__}.{type(value).__qualname__}")


def decode(data: Any, tensors: Mapping[int, Any]) -> Any:
    """Read the output of :func:`encode`.

    Raises:
        ValueError: it wrote no such thing.
        KeyError: there is no tensor of that number.
    """
    match data:
        case None | bool() | int() | float() | str():
            return data
        case list():
            return [decode(part, tensors) for part in data]
        case {"tensor": int(number)}:
            return tensors[number]
        case {"tuple": list(parts)}:
            return tuple(decode(part, tensors) for part in parts)
        case {"float": str(text)}:
            return _SPECIAL[text]
        case {"complex": [real, imaginary]}:
            return complex(decode(real, tensors), decode(imaginary, tensors))
        case {"device": str(text)}:
            return torch.device(text)
        case _:
            return _decode_constant(data)


def bind(form: Any, value: Any, tensors: dict[int, Any]) -> None:
    """Number the tensors of a result.

    Args:
        form: the result as :func:`encode` wrote it when it was recorded.
        value: the result now.
        tensors: number → tensor, to add to.
    """
    match form:
        case {"tensor": int(number)}:
            tensors[number] = value
        case list() | {"tuple": list()}:
            parts = form if isinstance(form, list) else form["tuple"]
            for part, each in zip(parts, value, strict=False):
                bind(part, each, tensors)


def _encode_float(value: float) -> Any:
    if value != value:
        return {"float": "nan"}
    return {"float": str(value)} if str(value) in _SPECIAL else value


def _decode_constant(data: Any) -> Any:
    if isinstance(data, dict) and len(data) == 1:
        [(kind, name)] = data.items()
        found = getattr(torch, str(name), None)
        if isinstance(found, _NAMED) and type(found).__name__ == kind:
            return found
    raise ValueError(f"{data!r} is not an argument of an operation")


# ---- switches ----

MOST_THREADS = 1024
"""Threads of torch: nobody computes with more, and a process that asks for too many ends."""


def read_switches() -> dict[str, Any]:
    """The switches of torch that change bits, in the terms of JSON."""
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "mkldnn": torch.backends.mkldnn.enabled,
    }


def check_switches(switches: Mapping[str, Any]) -> None:
    """Check that these can be set.

    Raises:
        ValueError: a switch is missing, or has a value that it cannot have.
    """
    kinds = {name: type(value) for name, value in read_switches().items()}
    for name, kind in kinds.items():
        if type(switches.get(name)) is not kind:
            raise ValueError(f"the switch {name!r} is {switches.get(name)!r}")
    is_precision = switches["matmul_precision"] in {"highest", "high", "medium"}
    if not is_precision or not 1 <= switches["threads"] <= MOST_THREADS:
        raise ValueError(f"the switches {dict(switches)} cannot be set")
    if switches["default_dtype"] not in {"float64", "float32", "float16", "bfloat16"}:
        raise ValueError(f"the default dtype cannot be {switches['default_dtype']!r}")


@contextlib.contextmanager
def switched(switches: Mapping[str, Any]) -> Iterator[None]:
    """Set the switches as they were recorded, and back at the end."""
    before = read_switches()
    with contextlib.ExitStack() as stack:
        if switches["mkldnn"] != before["mkldnn"]:
            stack.enter_context(torch.backends.mkldnn.flags(enabled=switches["mkldnn"]))
        stack.callback(_set_switches, before)
        _set_switches(switches)
        yield


def devices_of(tensors: Sequence[Tensor | None]) -> tuple[str, ...]:
    """The devices, besides the CPU, whose random generators may matter for an operation on these tensors."""
    found = {str(tensor.device) for tensor in tensors if tensor is not None and tensor.is_cuda}
    return tuple(sorted(found))


def read_random(devices: Sequence[str]) -> dict[str, Tensor]:
    """The states of the random generators of the CPU and of these devices."""
    return {"cpu": torch.get_rng_state()} | {device: torch.cuda.get_rng_state(device) for device in devices}


def set_random(states: Mapping[str, Tensor]) -> None:
    """Set random generators."""
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)


def _set_switches(switches: Mapping[str, Any]) -> None:
    """Set those that are otherwise; some of them cost a second to set, because torch loads its compiler."""
    now = read_switches()
    new = {name: switches[name] for name in now if switches[name] != now[name]}
    if "threads" in new:
        torch.set_num_threads(new["threads"])
    if {"deterministic", "warn_only"} & new.keys():
        torch.use_deterministic_algorithms(switches["deterministic"], warn_only=switches["warn_only"])
    if "matmul_precision" in new:
        torch.set_float32_matmul_precision(new["matmul_precision"])
    if "default_dtype" in new:
        torch.set_default_dtype(getattr(torch, new["default_dtype"]))
