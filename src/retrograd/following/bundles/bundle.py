"""A replay bundle as plain data, and reading it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrograd.core.errors import BundleVersionError
from retrograd.core.foreign.text import check_fields
from retrograd.following.bundles.copies import TensorCopies
from retrograd.following.bundles.files import (
    damaged,
    parse_copies,
    parse_program,
    parse_raised,
    print_copies,
    print_program,
    read_files,
)
from retrograd.following.bundles.program import Program, Raised, check_program, check_switches
from retrograd.following.graph.node import Line, NamedNode, SavedValue, TensorInfo


@dataclass(frozen=True, slots=True)
class Came:
    """A gradient that came in.

    Attributes:
        tensor: what it is.
        nonfinite: how many of its elements are NaN or infinite; None where they were not counted.
    """

    tensor: TensorInfo
    nonfinite: int | None


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """The exception of a node.

    Attributes:
        error: the exception.
        by: ``"operation"``: the last of the program; ``"Python"``: the code of a Function; ``"autograd"``: torch
            itself, around the operations.
        traceback: of Python code.
    """

    error: Raised
    by: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class NodeFacts(NamedNode):
    """The facts about the node of a bundle.

    Attributes:
        name, number, module, call, parameter, line: as of :class:`retrograd.following.graph.node.Node`.
        source: source lines around that line: number, text.
        incoming: what came in.
        saved: the tensors that it kept.
        attributes: what else it kept, as text.
        failure: what it raised; None where it returned.
        about: what the caller of ``write_bundle`` told besides.
        deviation: how what its operations give differs from what it gives where nobody watches; empty where it does
            not. A few nodes take another formula while their operations are recorded.
    """

    name: str
    number: int | None
    incoming: tuple[Came | None, ...]
    saved: tuple[SavedValue, ...] = ()
    attributes: Mapping[str, str] | None = None
    failure: NodeFailure | None = None
    module: str | None = None
    call: int = 1
    parameter: str | None = None
    line: Line | None = None
    source: tuple[tuple[int, str], ...] = ()
    about: Mapping[str, Any] | None = None
    deviation: str = ""


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions that wrote a bundle, and the time (seconds since 1970)."""

    torch: str
    retrograd: str
    python: str
    platform: str
    time: float


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """A replay bundle that was read, or is about to be written.

    Attributes:
        path: its folder; None before it is written.
        node: what is known of the node.
        versions: what wrote it.
        program: the operations that the node carried out.
        inputs: the tensors that these read, named ``"incoming.0"``, ``"saved.self"``, ``"context.mask"`` (on the
            context of a Function), ``"other.0"`` (any other: of a closure, a buffer, unpacked by a hook, or made by
            code that torch does not see).
        names: of the inputs.
        outgoing: what the node returned.
        random: states of the random generators: at the beginning, and where operations drew from them.
        switches: of torch that change bits.
        refusal: why it can be replayed only as one that is trusted; empty where it can be as any other. Whoever wrote
            it says so, and nobody relies on it.
    """

    path: Path | None
    node: NodeFacts
    versions: Versions
    program: Program
    inputs: TensorCopies
    names: tuple[str, ...]
    outgoing: TensorCopies
    random: tuple[Mapping[str, Tensor], ...]
    switches: Mapping[str, Any]
    refusal: str = ""


def print_bundle(bundle: Bundle) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A bundle in the terms of JSON, and the entries of its tensor file."""
    entries: dict[str, Tensor] = {}
    outgoing = [f"outgoing.{index}" for index in range(len(bundle.outgoing.tensors))]
    facts = {
        "versions": asdict(bundle.versions),
        "node": _plain(bundle.node),
        "switches": dict(bundle.switches),
        "refusal": bundle.refusal,
        "random": [
            {device: _enter(entries, f"random.{index}.{device}", state) for device, state in states.items()}
            for index, states in enumerate(bundle.random)
        ],
        "inputs": print_copies(bundle.inputs, bundle.names, entries),
        "program": print_program(bundle.program),
        "outgoing": print_copies(bundle.outgoing, outgoing, entries),
    }
    return facts, entries


def read_bundle(path: str | Path, *, strict: bool = True) -> Bundle:
    """Read a replay bundle.

    Args:
        path: its folder.
        strict: whether to refuse what another version of torch has written.

    Raises:
        DamagedBundleError: it cannot be read.
        BundleVersionError: another version of torch has written it.
    """
    path = Path(path)
    facts, entries = read_files(path)
    try:
        written_with = str(facts["versions"]["torch"])
        if strict and written_with != torch.__version__:
            raise BundleVersionError(
                f"The bundle {path} was written with torch {written_with}; this is torch {torch.__version__}.",
                repair="replay it with that version, or with strict=False.",
                reason="between versions of torch operations change, and give other bits.",
            )
        return parse_bundle(path, facts, entries)
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError, OverflowError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def parse_bundle(path: Path, facts: dict[str, Any], entries: dict[str, Tensor]) -> Bundle:
    """Read the output of :func:`print_bundle`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it wrote no such thing.
    """
    inputs, names = parse_copies(facts["inputs"], entries)
    outgoing, _ = parse_copies(facts["outgoing"], entries)
    program = parse_program(facts["program"], len(names))
    check_program(program)
    random = tuple({str(device): entries[name] for device, name in each.items()} for each in facts["random"])
    if not random or any((each.random or 0) >= len(random) for each in program.operations):
        raise ValueError("a state of the random generators is missing")
    check_switches(facts["switches"])
    node = _parse_node(facts["node"])
    if node.failure is None and len(program.outputs) != len(outgoing.tensors):
        raise ValueError("the program and the node do not return as many gradients")
    versions, refusal = Versions(**facts["versions"]), str(facts["refusal"])
    check_fields(versions)
    return Bundle(path, node, versions, program, inputs, names, outgoing, random, facts["switches"], refusal)


def _parse_node(data: dict[str, Any]) -> NodeFacts:
    failure, line = data["failure"], data["line"]
    node = NodeFacts(
        name=str(data["name"]),
        number=data["number"],
        incoming=tuple(None if each is None else _parse_came(each) for each in data["incoming"]),
        saved=tuple(_parse_saved(each) for each in data["saved"]),
        attributes=dict(data["attributes"] or {}),
        failure=None if failure is None else _parse_failure(failure),
        module=data["module"],
        call=int(data["call"]),
        parameter=data["parameter"],
        line=None if line is None else Line(**line),
        source=tuple((int(number), str(text)) for number, text in data["source"]),
        about=dict(data["about"] or {}),
        deviation=str(data["deviation"]),
    )
    for each in (node, *filter(None, (node.line, node.failure, *node.incoming, *node.saved))):
        check_fields(each)
    return node


def _parse_came(data: dict[str, Any]) -> Came:
    return Came(_parse_info(data["tensor"]), data["nonfinite"])


def _parse_saved(data: dict[str, Any]) -> SavedValue:
    tensor = data["tensor"]
    return SavedValue(data["name"], None if tensor is None else _parse_info(tensor), data["value"], data["version"])


def _parse_info(data: dict[str, Any]) -> TensorInfo:
    return TensorInfo(tuple(data["shape"]), str(data["dtype"]), str(data["device"]))


def _parse_failure(data: dict[str, Any]) -> NodeFailure:
    error = parse_raised(data["error"])
    assert error is not None
    return NodeFailure(error, str(data["by"]), str(data["traceback"]))


def _enter(entries: dict[str, Tensor], name: str, tensor: Tensor) -> str:
    entries[name] = tensor
    return name


def _plain(value: Any) -> Any:
    """Anything in the terms of JSON: what that does not know as text."""
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return value if value - value == 0 else str(value)
        case Mapping():
            return {str(name): _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case _ if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
            return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
        case _:
            return str(value)
