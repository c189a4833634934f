"""A node of a backward graph as plain data, which holds no tensor and no graph; and the numbers in its gradients.

To look at numbers waits for the tensor's device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

import torch
from torch import Tensor

from retrograd.core.cells import show_file
from retrograd.core.hooks.engine import is_transformed
from retrograd.core.norms import norm
from retrograd.core.sites.pattern import translate_glob
from retrograd.core.sites.site import says_call

_INFO = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?: on (?P<device>.+))?")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor without its values. Its text is as in ``float32[4, 3]``."""

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"

    def __str__(self) -> str:
        where = "" if self.device == "cpu" else f" on {self.device}"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{where}"

    @classmethod
    def parse(cls, text: str) -> TensorInfo:
        """Read its text again.

        Raises:
            ValueError: the text describes no tensor.
        """
        match = _INFO.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} describes no tensor")
        shape = tuple(int(size) for size in match["shape"].split(",") if size)
        return cls(shape, match["dtype"], match["device"] or "cpu")


@dataclass(frozen=True, slots=True)
class Edge:
    """Where a gradient goes.

    Attributes:
        node: index of the node.
        slot: which of its incoming gradients this is.
    """

    node: int
    slot: int


@dataclass(frozen=True, slots=True)
class Line:
    """A place in the forward's source. Its text is as in ``model.py:12 in forward``.

    Attributes:
        file, line, function: where.
        operation: the torch function that was called there, as in ``"linear"``; empty where that is not known.
    """

    file: str
    line: int
    function: str
    operation: str = ""

    def __str__(self) -> str:
        return f"{self.place} in {self.function}"

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class SavedValue:
    """Something that an operation kept for its backward.

    Attributes:
        name: torch's own name for it; of a Python Function ``"tensors[0]"`` and so on.
        tensor: what tensor it is; None for other values, and for tensors that hooks have packed into something else.
        value: text of what is not a tensor.
        version: how often the tensor's memory had been written to when the graph was walked.
    """

    name: str
    tensor: TensorInfo | None = None
    value: str = ""
    version: int | None = None


def name_place(name: str, module: str | None, call: int, parameter: str | None) -> str:
    """The text that names a node to people."""
    if parameter is not None:
        return parameter
    number = f"#{call}" if call > 1 else ""
    return f"{module}{number}:{name}" if module is not None else name


class NamedNode:
    """A node with the names that people know it by: of a graph, of a trace or of a bundle."""

    __slots__ = ()

    name: str
    module: str | None
    call: int
    parameter: str | None

    @property
    def place(self) -> str:
        """The module call and kind, as in ``"blocks.3#2:MulBackward0"``; a leaf's name where it has one."""
        return name_place(self.name, self.module, self.call, self.parameter)


@dataclass(frozen=True, slots=True)
class Node(NamedNode):
    """A node of a backward graph.

    Attributes:
        index: its place in the graph.
        name: its kind, as in ``"AddmmBackward0"``.
        number: its sequence number; None for a leaf's.
        incoming: what gradients it takes: one for each result of its operation in the forward.
        edges: where each gradient that it gives goes; None where nobody wants it.
        outgoing: what those gradients are, as far as somebody wants them.
        saved: what its operation kept.
        module: path of the module in whose call it was made; None where that is not known, or outside of all.
        call: which call of that module in its forward: 1, 2, …
        line: source line of the forward that made it.
        parameter: name of the leaf, for a leaf's node.
    """

    index: int
    name: str
    number: int | None
    incoming: tuple[TensorInfo | None, ...] = ()
    edges: tuple[Edge | None, ...] = ()
    outgoing: tuple[TensorInfo | None, ...] = ()
    saved: tuple[SavedValue, ...] = ()
    module: str | None = None
    call: int = 1
    line: Line | None = None
    parameter: str | None = None

    @property
    def is_leaf(self) -> bool:
        """True if this is where a gradient is added to the ``.grad`` of a leaf."""
        return self.number is None


def matches(pattern: str, node: NamedNode) -> bool:
    """Return whether a glob is meant to match this node: by kind, module, ``module:kind`` or the name of the leaf.

    One with a ``#`` asks for calls, ``fc#1``, ``fc#2:AddmmBackward0``, ``fc#*``; one without means every call.
    """
    module = node.module
    if says_call(pattern):
        names = [] if module is None else [f"{module}#{node.call}", f"{module}#{node.call}:{node.name}"]
        return any(map(translate_glob(pattern), names))
    inside = [] if module is None else [module, f"{module}:{node.name}"]
    names = [node.name, *inside] if node.parameter is None else [node.name, *inside, node.parameter]
    return any(map(translate_glob(pattern), names))


def holds_nonfinite(gradients: Iterable[Tensor | None]) -> bool:
    """Return whether any of these holds NaN or infinity; False where that cannot be told."""
    return any(gradient is not None and not _is_finite(gradient) for gradient in gradients)


def count_nonfinite(tensor: Tensor) -> int | None:
    """Count the elements that are NaN or infinite; None where that cannot be told."""
    with torch.no_grad():
        try:
            values = readable_values(tensor)
            return None if values is None else int(values.numel() - values.isfinite().sum().item())
        except (RuntimeError, NotImplementedError):  # nested, quantized, or out of memory
            return None


def norm_of(gradients: Iterable[Tensor | None]) -> float | None:
    """The Euclidean norm of all of them together; None if none of them can be read."""
    norms: list[float] = []
    with torch.no_grad():
        for gradient in gradients:
            values = readable_values(gradient)
            if values is not None:
                norms.append(float(norm(values)))
    return math.hypot(*norms) if norms else None


def readable_values(tensor: Tensor | None) -> Tensor | None:
    """The numbers in a tensor, without its graph; None where it has none that can be read."""
    if tensor is None or is_transformed(tensor) or tensor.is_meta:
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    values = tensor.detach()
    if values.is_sparse:
        return values.coalesce().values()
    if values.layout is not torch.strided:
        return values.values()
    return values


def _is_finite(gradient: Tensor) -> bool:
    values = readable_values(gradient)
    if values is None or not values.numel():
        return True
    with torch.no_grad():
        if not values.is_complex() and math.isfinite(values.sum().item()):  # twenty times as fast as to ask them all
            return True
        return bool(values.isfinite().all())


def shorten_line(line: Line | None) -> str:
    """File and number, as in ``model.py:30``; empty for None. An ``__init__.py`` keeps the folder that names it."""
    if line is None:
        return ""
    path = PurePath(show_file(line.file))
    name = f"{path.parent.name}/{path.name}" if path.stem == "__init__" else path.name
    return f"{name}:{line.line}"
