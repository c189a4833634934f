"""What is noted of saved tensors while a program runs: plain data that keeps no tensor and no graph alive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Held = Literal["saved", "attribute", "hooks", "checkpoint", "argument"]
"""Who holds a tensor: torch for the node; the node of a Python Function as an attribute; somebody's saved-tensor hooks,
in what they have packed it into; a checkpoint that has run its function again; a checkpoint as an argument of it."""


class Maker(NamedTuple):
    """The operation that made a tensor.

    Attributes:
        node: kind of its node.
        number: the node's sequence number.
        sources: numbers of the nodes that made what it was given; leaves have none.
    """

    node: str
    number: int
    sources: tuple[int, ...] = ()


class TensorFacts(NamedTuple):
    """A tensor, and the memory that it keeps. Its fields but the last are columns of the table.

    Attributes:
        shape: sizes; None for nested tensors.
        strides: in elements; None where there is no such thing.
        offset: where in its memory it begins, in elements.
        asked: bytes of its elements, each counted once for each place in the shape.
        storages, storage_bytes: number and bytes of each piece of memory.
        kind: ``parameter``, ``parameter view``, ``buffer``, ``buffer view``, ``cast``, ``input`` or ``intermediate``.
        name: name of that parameter or buffer.
        version: how often its memory had been written to.
        maker: what made it; None if that was not recorded.
    """

    shape: tuple[int, ...] | None
    dtype: str
    device: str
    strides: tuple[int, ...] | None
    offset: int
    asked: int
    storages: tuple[int, ...]
    storage_bytes: tuple[int, ...]
    kind: str
    name: str
    version: int | None
    maker: Maker | None


@dataclass(slots=True)
class SlotFacts:
    """One tensor that a node keeps.

    Attributes:
        tensor: None for as long as it is not there: a checkpoint has not run again.
        holder: identity of the checkpoint's holder that stands for it.
        frame: number of the checkpoint; 0 for none.
        packed: when a checkpoint has made it again, by ``time.perf_counter_ns``.
    """

    slot: str
    held: Held
    tensor: TensorFacts | None
    holder: int = 0
    frame: int = 0
    packed: int | None = None


@dataclass(slots=True)
class NodeFacts:
    """A node that keeps tensors.

    Attributes:
        number: its sequence number.
        seen: when it was found, by ``time.perf_counter_ns``: it was made before.
        thread: number of the thread that found it.
        runs: when it began to run, each time.
        released: index of the run that freed what it kept; None if none has.
    """

    name: str
    number: int
    seen: int
    thread: int
    slots: list[SlotFacts]
    runs: list[int] = field(default_factory=list)
    released: int | None = None
