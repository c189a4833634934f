"""A replay bundle as plain data, and opening one, which runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor

from retrograd.core.foreign.text import check_fields, from_plain, show_plainly, to_plain
from retrograd.following.bundles.copies import MemoryBlock, StoredTensor, check_copies
from retrograd.following.bundles.files import damaged, read_files
from retrograd.following.bundles.program import BundledOperation, Raised, Switches
from retrograd.following.graph.node import Line, NamedNode, SavedValue, TensorInfo

_MOST_OPERATIONS = 20


@dataclass(frozen=True, slots=True)
class Came:
    """A gradient that came in.

    Attributes:
        tensor: what it is.
        nonfinite: how many of its elements are NaN or infinite; None where they were not counted.
    """

    tensor: TensorInfo
    nonfinite: int | None

    def __str__(self) -> str:
        return f"{self.tensor}, {self.nonfinite} not finite" if self.nonfinite else str(self.tensor)


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
        saved: what it kept: tensors, and what else as text.
        failure: what it raised; None where it returned.
        about: what the caller of ``write_bundle`` told besides.
        deviation: how what its operations give differs from what it gives where nobody watches; empty where it does
            not. A few nodes take another formula while their operations are recorded.
    """

    name: str
    number: int | None
    incoming: tuple[Came | None, ...]
    saved: tuple[SavedValue, ...] = ()
    failure: NodeFailure | None = None
    module: str | None = None
    call: int = 1
    parameter: str | None = None
    line: Line | None = None
    source: tuple[tuple[int, str], ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
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
    """A node of a backward pass with all that is needed to run it again: :func:`retrograd.replay`.

    Its text says what it holds.

    Attributes:
        versions: what wrote it.
        node: what is known of the node.
        switches: of torch that change bits.
        operations: what the node carried out.
        outputs: which tensors it returned; None where it returned none.
        inputs: the tensors that the operations read, named ``"incoming.0"``, ``"saved.self"``, ``"context.mask"`` (on
            the context of a Function), ``"other.0"`` (any other: of a closure, a buffer, unpacked by a hook, or made
            by code that torch does not see).
        outgoing: the tensors that it returned.
        random: names of the states of the random generators by device: at the beginning, and where operations drew.
        blocks: the memory of the tensors, by name.
        entries: the contents of that memory, and the states of generators, by name: ``tensors.safetensors``.
        path: its folder; None before it is written.
        doubt: why it may not be this user's own; empty where it is.
    """

    versions: Versions
    node: NodeFacts
    switches: Switches
    operations: tuple[BundledOperation, ...]
    outputs: tuple[str | int | None, ...]
    inputs: tuple[StoredTensor, ...]
    outgoing: tuple[StoredTensor | None, ...]
    random: tuple[Mapping[str, str], ...]
    blocks: Mapping[str, MemoryBlock]
    entries: Mapping[str, Tensor]
    path: Path | None = None
    doubt: str = ""

    def __str__(self) -> str:
        return show_plainly("\n".join(describe_bundle(self)))

    def __repr__(self) -> str:
        return f"<Bundle of {show_plainly(self.node.place)}>"


_APART = frozenset({"entries", "path", "doubt"})
"""Fields that are not written into ``bundle.json``."""


def print_bundle(bundle: Bundle) -> dict[str, Any]:
    """A bundle in the terms of JSON, but for the contents of its memory."""
    return {each.name: to_plain(getattr(bundle, each.name)) for each in fields(bundle) if each.name not in _APART}


def open_bundle(path: str | Path) -> Bundle:
    """Open a replay bundle, whoever has written it: it is read, and nothing in it is run.

    Args:
        path: its folder.

    Raises:
        DamagedBundleError: it cannot be read.
    """
    path = Path(path)
    facts, entries, doubt = read_files(path)
    try:
        hints = {name: hint for name, hint in get_type_hints(Bundle).items() if name not in _APART}
        bundle = Bundle(
            **{name: from_plain(facts[name], hint) for name, hint in hints.items()},
            entries=entries,
            path=path,
            doubt=doubt,
        )
        check_fields(bundle)
        check_copies((*bundle.inputs, *bundle.outgoing), bundle.blocks, entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}{_say_version(facts)}") from error
    return bundle


def _say_version(facts: dict[str, Any]) -> str:
    versions = facts.get("versions")
    written = versions.get("torch") if isinstance(versions, dict) else None
    return "" if written == torch.__version__ else f"; torch {written} has written it, and this is {torch.__version__}"


def describe_bundle(bundle: Bundle) -> Iterator[str]:
    """Describe what a bundle holds, line by line."""
    node, operations = bundle.node, bundle.operations
    number = "" if node.number is None else f", number {node.number}"
    yield f"{node.place}{number}, written with torch {bundle.versions.torch}"
    if node.line is not None:
        yield f"  made at {node.line}"
        yield from (f"  {'>' if number == node.line.line else ' '} {number:5} {text}" for number, text in node.source)
    yield from (f"  came in  {place}: {came}" for place, came in enumerate(node.incoming))
    yield from (
        f"  saved    {each.name}: {each.tensor or each.value or 'None, or packed by hooks'}" for each in node.saved
    )
    yield from (f"  runs     {place}: {each.name}" for place, each in enumerate(operations[:_MOST_OPERATIONS]))
    if len(operations) > _MOST_OPERATIONS:
        yield f"  runs     … and {len(operations) - _MOST_OPERATIONS} more operations"
    if node.failure is not None:
        yield f"  raised   {node.failure.error}"
