"""Saved tensors that autograd refuses to use since they were written to: who saved them, and who wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from retrograd.core.hooks.nodes import edges_of, find_overwritten, is_leaf, name_of, number_of, variable_of
from retrograd.core.hooks.saved import is_plain
from retrograd.core.hooks.writes import Write, WriteNotes
from retrograd.following.graph.node import TensorInfo
from retrograd.following.graph.origin import Origin
from retrograd.following.graph.walker import describe

NameLeaf = Callable[[Tensor], str | None]


class Places(Protocol):
    """Knows where nodes were made, and what was written: :class:`~retrograd.following.graph.origins.Origins`, say."""

    @property
    def writes(self) -> WriteNotes | None:
        """The last writes."""

    def find(self, number: int) -> Origin | None:
        """Where the node with this sequence number was made."""


@dataclass(frozen=True, slots=True)
class Overwritten:
    """A saved tensor that was written to in place before it was used.

    Attributes:
        node: kind of the node that saved it.
        saved: torch's name for it: ``"self"``, ``"result"``, ``"weight"``.
        tensor: what it is.
        parameter: its name, if it is a parameter, or a view of one; else empty.
        module: path of the module in whose call it was saved; None outside of all, or where that is not known.
        line: ``file:line`` of the operation that saved it; empty where that is not known.
        then, now: its version when it was saved, and when it was to be used.
        writes: who wrote in between, as far as that was seen.
    """

    node: str
    saved: str
    tensor: TensorInfo
    then: int
    now: int
    parameter: str = ""
    module: str | None = None
    line: str = ""
    writes: tuple[Write, ...] = ()

    @property
    def is_updated(self) -> bool:
        """True if an optimizer wrote."""
        return any(each.writer.endswith(".step") for each in self.writes)

    def sentence(self) -> str:
        """Describe who saved it, and who wrote."""
        what = f"{self.parameter}, {self.tensor}," if self.parameter else f"{self.saved} of {self.node}, {self.tensor},"
        where = f" in {self.module or 'the model itself'}" if self.module is not None else ""
        line = f" at {self.line}" if self.line else ""
        return (
            f"{what} was saved by {self.node}{where}{line} at version {self.then}, and is at version {self.now}:"
            f" {self.tell_writer()}"
        )

    def tell_writer(self) -> str:
        """Describe who wrote."""
        if not self.writes:
            return "no operation was seen writing, so it was done before it was watched, in a hook, or in compiled code"
        return f"written to by {', then by '.join(map(str, self.writes))}"

    def repair(self) -> str:
        """Return what to do."""
        if self.is_updated:
            return (
                "call step() after the last backward() through this forward, or run the forward again after step(), or"
                " detach() what belongs to the other network"
            )
        return "compute a new tensor instead (`x = x + 1` for `x += 1`), or write into a clone (`x = x.clone()`)"


def explain_overwritten(
    nodes: Iterable[Any], origins: Places | None = None, name_leaf: NameLeaf = lambda _: None
) -> Overwritten | None:
    """Find the saved tensor that autograd refuses, in the order in which a pass asks for them.

    Args:
        nodes: where to look; those that have run have freed what they had saved.
        origins: where nodes were made, and what was written.
        name_leaf: the name of a parameter.
    """
    for node in sorted((each for each in nodes if not is_leaf(each)), key=number_of, reverse=True):
        found = find_overwritten(node)
        if found is not None:
            return _describe(node, *found, origins, name_leaf)
    return None


def _describe(
    node: Any, saved: str, tensor: Tensor, then: int, now: int, origins: Places | None, name_leaf: NameLeaf
) -> Overwritten:
    origin = (origins.find(number_of(node)) if origins is not None else None) or Origin()
    writes = origins.writes.between(storage_of(tensor), then, now) if origins is not None and origins.writes else []
    info = describe(tensor)
    assert info is not None
    return Overwritten(
        node=name_of(node),
        saved=saved,
        tensor=info,
        then=then,
        now=now,
        parameter=name_behind(node, tensor, name_leaf),
        module=origin.module,
        line=origin.place,
        writes=tuple(writes),
    )


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's memory; −1 where it has none."""
    return id(tensor.untyped_storage()) if is_plain(tensor) else -1


def name_behind(node: Any, tensor: Tensor, name_leaf: NameLeaf) -> str:
    """The name of the parameter whose memory a node has saved: of one that its gradients go to, or to a view of it."""
    storage = storage_of(tensor)
    waiting: list[Any] = [following for following, _ in edges_of(node)]
    for each in waiting:
        variable = variable_of(each) if each is not None else None
        if variable is not None and storage_of(variable) == storage:
            return name_leaf(variable) or ""
        if each is not None and not is_leaf(each) and len(waiting) < _NEAR:
            waiting.extend(following for following, _ in edges_of(each))
    return ""


_NEAR = 16
"""Nodes between a parameter and what saved a view of it, as in a linear layer: transposed, expanded."""
