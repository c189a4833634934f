"""Operations one after the other, as plain data that any process can run.

Their arguments are in the terms of JSON, where tensors go by names and numbers. Beside them what they give depends on
random generators and on switches of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from retrograd.core.errors import ReplayError
from retrograd.core.hooks.dispatch import below_autograd, find_operation
from retrograd.following.bundles.copies import constant, print_constant

Tensors = Mapping[str | int, Any]
"""Inputs by their names, and results by their numbers."""


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
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    result: Any = None
    random: int | None = None
    raises: Raised | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """The outcome of running operations.

    Attributes:
        outputs: what they returned; empty where one raised.
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


def run_operations(
    operations: Sequence[BundledOperation],
    outputs: Sequence[str | int | None],
    inputs: Mapping[str, Tensor],
    set_random: Callable[[int], None],
) -> Ran:
    """Run operations of torch's dispatcher, and nothing else.

    Args:
        operations: what to run.
        outputs: which tensors to return.
        inputs: by name; some operations write to them.
        set_random: sets the random generators to one of the states that were recorded.

    Raises:
        ReplayError: this process does not know one of the operations.
        ValueError, KeyError, RuntimeError: something in them is not of what :func:`encode` writes.
    """
    found = {operation.name: _find(operation.name) for operation in operations}
    tensors = dict[str | int, Any](inputs.items())
    with below_autograd():
        for index, operation in enumerate(operations):
            if operation.random is not None:
                set_random(operation.random)
            args = [decode(value, tensors) for value in operation.args]
            kwargs = {name: decode(value, tensors) for name, value in operation.kwargs.items()}
            try:
                result = found[operation.name](*args, **kwargs)
            except Exception as error:
                went_on = operation.raises is not None and index + 1 < len(operations)
                if went_on and describe_error(error) == operation.raises:
                    continue  # the code that was recorded caught it
                return Ran((), error, index)
            if operation.raises is not None:
                return Ran((), None, index)
            bind(operation.result, result, tensors)
    return Ran(tuple(None if each is None else tensors[each] for each in outputs))


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

_SPECIAL = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


class UnwritableArgumentError(TypeError):
    """An argument of an operation cannot be written down."""


def encode(value: Any, name_of: Callable[[Tensor], str | int]) -> Any:
    """An argument or result of an operation in the terms of JSON.

    Args:
        value: the argument or result.
        name_of: gives the name of an input, or the number of a result.

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
            return {"tensor": name_of(value)}
        case torch.Size() | list():
            return [encode(part, name_of) for part in value]
        case tuple():
            return {"tuple": [encode(part, name_of) for part in value]}
        case torch.device():
            return {"device": str(value)}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"constant": print_constant(value)}
        case _:
            raise UnwritableArgumentError(f"a {type(value).__module__}.{type(value).__qualname__}")


def decode(data: Any, tensors: Tensors) -> Any:
    """Read the output of :func:`encode`.

    Raises:
        ValueError: it wrote no such thing.
        KeyError: there is no such tensor, or no such constant.
    """
    match data:
        case None | bool() | int() | float() | str():
            return data
        case list():
            return [decode(part, tensors) for part in data]
        case {"tensor": str(name) | int(name)}:
            return tensors[name]
        case {"tuple": list(parts)}:
            return tuple(decode(part, tensors) for part in parts)
        case {"float": str(text)}:
            return _SPECIAL[text]
        case {"complex": [real, imaginary]}:
            return complex(decode(real, tensors), decode(imaginary, tensors))
        case {"device": str(text)}:
            return torch.device(text)
        case {"constant": str(text)}:
            return constant(text)
        case _:
            raise ValueError(f"{data!r} is not an argument of an operation")


def bind(form: Any, value: Any, tensors: dict[str | int, Any]) -> None:
    """Number the tensors of a result.

    Args:
        form: the result as :func:`encode` wrote it when it was recorded.
        value: the result now.
        tensors: to add to.
    """
    match form:
        case {"tensor": str(name) | int(name)}:
            tensors[name] = value
        case list() | {"tuple": list()}:
            parts = form if isinstance(form, list) else form["tuple"]
            for part, each in zip(parts, value, strict=False):
                bind(part, each, tensors)


def _encode_float(value: float) -> Any:
    if value != value:
        return {"float": "nan"}
    return {"float": str(value)} if str(value) in _SPECIAL else value


# ---- switches ----


@dataclass(frozen=True, slots=True)
class Switches:
    """The switches of torch that change bits."""

    threads: int
    deterministic: bool
    warn_only: bool
    matmul_precision: str
    default_dtype: str
    mkldnn: bool


def read_switches() -> Switches:
    """The switches as they are now."""
    return Switches(
        threads=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        matmul_precision=torch.get_float32_matmul_precision(),
        default_dtype=print_constant(torch.get_default_dtype()),
        mkldnn=bool(torch.backends.mkldnn.enabled),
    )


@contextlib.contextmanager
def switched(switches: Switches) -> Iterator[None]:
    """Set the switches as they were recorded, and back at the end."""
    before = read_switches()
    with contextlib.ExitStack() as stack:
        if switches.mkldnn != before.mkldnn:
            stack.enter_context(torch.backends.mkldnn.flags(enabled=switches.mkldnn))
        stack.callback(_set_switches, before)
        _set_switches(switches)
        yield


def _set_switches(switches: Switches) -> None:
    """Set those that are otherwise; some of them cost a second to set, because torch loads its compiler."""
    now = asdict(read_switches())
    new = {name for name, value in asdict(switches).items() if value != now[name]}
    if "threads" in new:
        torch.set_num_threads(switches.threads)
    if {"deterministic", "warn_only"} & new:
        torch.use_deterministic_algorithms(switches.deterministic, warn_only=switches.warn_only)
    if "matmul_precision" in new:
        torch.set_float32_matmul_precision(switches.matmul_precision)
    if "default_dtype" in new:
        torch.set_default_dtype(constant(switches.default_dtype))


def set_random(states: Mapping[str, Tensor]) -> None:
    """Set random generators."""
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)
