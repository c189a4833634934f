"""Reading and running one node of an autograd graph.

A node is what ``tensor.grad_fn`` gives. It takes the gradients of what its operation returned in the forward (they
*come in*) and gives the gradients of what that operation was given (they *go out*).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes

from retrograd.core.errors import FreedGraphError, NoGraphError
from retrograd.core.hooks.engine import TORCH

number_of: Callable[[Any], int] = methodcaller("_sequence_nr")
"""The sequence number of a node: those made later in one thread have larger ones, and run earlier."""

LEAF_NUMBER = 2**64 - 1
"""The sequence number of the nodes of leaves: they run as soon as they can."""

SAVED_TENSOR: type = torch._C._autograd.SavedTensor
"""The type of torch's own holders of saved tensors."""

_SAVED = "_saved_"
_RAW = "_raw_saved_"

LEAF_KIND: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The type of a leaf's node."""

SHARED_KIND = "CppFunction"
"""Name of the type of nodes of those kinds that torch has no type of their own for."""

IDENTITIES_LAST = TORCH >= (2, 13)
"""True if torch hands out one and the same Python object for a node as long as it lives."""

_REFUSED = re.compile(r"is at version (?P<now>\d+); expected version (?P<then>\d+) instead")
"""In the message of autograd's check of what it saved."""

_KEY = "retrograd.identity"
_identities = itertools.count()

_saved: dict[type, tuple[tuple[str, ...], tuple[str, ...], Callable[[Any], tuple[Any, ...]]]] = {}


class Metadata(Protocol):
    """Torch's description of a gradient that a node takes."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    is_nested_tensor: bool


def name_of(node: Any) -> str:
    """The kind of a node, as in ``"AddmmBackward0"``."""
    return str(node.name()).rpartition("::")[2]


def names_of(nodes: Sequence[Any]) -> list[str]:
    """The kinds of nodes; each kind is asked once, but for the type that torch has for all that have none."""
    kinds = list(map(type, nodes))
    names = {kind: name_of(node) for kind, node in dict(zip(kinds, nodes, strict=True)).items()}
    if any(kind.__name__ == SHARED_KIND for kind in names):
        return list(map(name_of, nodes))
    return list(map(names.__getitem__, kinds))


def is_leaf(node: Any) -> bool:
    """Return whether a node only adds what comes in to the ``.grad`` of a leaf."""
    return type(node) is LEAF_KIND


def is_python(node: Any) -> bool:
    """Return whether a node was made by a Python ``Function``."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def variable_of(node: Any) -> Tensor | None:
    """The leaf that a leaf's node adds to; None for another node."""
    return node.variable if is_leaf(node) else None


def identity_of(node: Any) -> tuple[int, int]:
    """A key that tells a node from all others that live at the same time, whatever object it is handed out as."""
    if IDENTITIES_LAST:
        return id(node), number_of(node)
    return node.metadata.setdefault(_KEY, next(_identities)), number_of(node)


def edges_of(node: Any) -> tuple[tuple[Any, int], ...]:
    """Where each outgoing gradient goes: a node (None: nowhere), and which of its incoming gradients it is."""
    edges: tuple[tuple[Any, int], ...] = node.next_functions
    return edges


def inputs_of(node: Any) -> tuple[Metadata, ...]:
    """Shape, dtype and device of each gradient that must come in."""
    described: tuple[Metadata, ...] = node._input_metadata
    return described


def saved_of(node: Any) -> dict[str, Any]:
    """Read all that the operation saved for its backward, without unpacking it.

    Returns:
        Name → a ``SavedTensor`` (see :func:`peek`), a list of them, or a plain value. Of a Python Function all tensors
        are under ``"tensors"``.
    """
    kind = type(node)
    return dict(zip(names_of_saved(kind), read_saved(kind, node), strict=True))


def names_of_saved(kind: type) -> tuple[str, ...]:
    """The names of what operations of this kind save."""
    return _how_saved(kind)[0]


def read_saved(kind: type, node: Any) -> tuple[Any, ...]:
    """What a node of this kind has saved, as :func:`saved_of` tells, by the order of its names."""
    known = _saved.get(kind) or _how_saved(kind)
    try:
        return known[2](node)
    except RuntimeError:  # freed: torch raises for some kinds of node, and says None for others
        return tuple([_read_one(node, attribute) for attribute in known[1]])


def _how_saved(kind: type) -> tuple[tuple[str, ...], tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """Names of what nodes of a kind have saved, the attributes to read, and what reads all of them."""
    known = _saved.get(kind)
    if known is None:
        found = tuple(_find_saved(kind))
        attributes = tuple(attribute for _, attribute in found)
        known = _saved[kind] = tuple(name for name, _ in found), attributes, _reader(attributes)
    return known


def _reader(attributes: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if not attributes:
        return lambda node: ()
    read = attrgetter(*attributes)
    return read if len(attributes) > 1 else lambda node: (read(node),)


def _read_one(node: Any, attribute: str) -> Any:
    try:
        return getattr(node, attribute)
    except RuntimeError:
        return None


def is_saved_tensor(value: Any) -> bool:
    """Return whether this is torch's own holder of a tensor that a node has saved."""
    return type(value) is SAVED_TENSOR


class Held:
    """What a ``pack`` of the program's has returned, while it is watched, and what it was given.

    Attributes:
        held: the former.
        sample: of the latter.
        shape: of the latter.
        memory: where the latter lies; 0 where ``held`` is not it, so that it may be freed and used again.
    """

    __slots__ = ("held", "memory", "sample", "shape")

    def __init__(self, held: Any, sample: Tensor, shape: torch.Size, memory: int) -> None:
        self.held, self.sample, self.shape, self.memory = held, sample, shape, memory


def holds(raw: Any) -> Any:
    """What is in a ``SavedTensor``, as torch or a hook that packs has it; None where it is freed.

    A tensor may be the program's own, or be part of a graph: it is looked at, and let go of.
    """
    try:
        data = raw.data
        return data.held if type(data) is Held else data
    except RuntimeError:
        return None


def peek(raw: Any) -> Tensor | None:
    """The tensor in a ``SavedTensor``, without running the hooks that unpack it; None where that cannot be told.

    It shares memory with what was saved and is not part of any graph.
    """
    held = holds(raw)
    return detach(held) if isinstance(held, Tensor) else None


def detach(held: Tensor) -> Tensor:
    """A tensor over the same memory, with the same count of writes, and without a graph. Modes are not told.

    A number of Python's that an operation has saved is handed to dispatch modes as a number, and no operation takes it.
    """
    if not torch._C._len_torch_dispatch_stack():
        return held.detach()
    with _disable_current_modes():
        return held.detach() if held.dim() else held.detach().view(())


def is_freed(node: Any) -> bool:
    """Return whether a backward pass has freed what this node had saved."""
    names, attributes, _ = _how_saved(type(node))
    try:
        for name, attribute in zip(names, attributes, strict=True):
            raw = getattr(node, attribute)  # of several, and of a Python Function's, it raises
            if is_saved_tensor(raw) and raw.data is None:
                getattr(node, _SAVED + name)  # nothing is there to be unpacked: None was saved, or it raises
    except RuntimeError:
        return True
    return False


def find_overwritten(node: Any) -> tuple[str, Tensor, int, int] | None:
    """The first saved tensor of a node that autograd refuses to hand out, since it was written to.

    Returns:
        Its name, a tensor that shares its memory, and its versions: when it was saved, and now. None where there is
        none; tensors that hooks have packed are not asked for, and autograd does not check them.
    """
    for name, raw in saved_tensors_of(node):
        tensor = peek(raw) if raw.unpack_hook is None else None
        versions = _refused_versions(node, name, raw) if tensor is not None else None
        if tensor is not None and versions is not None and versions[1] == tensor._version:
            return name, tensor, *versions
    return None


def saved_tensors_of(node: Any) -> Iterator[tuple[str, Any]]:
    """The ``SavedTensor`` that a node has, by name; of several under one name, ``"tensors[0]"``."""
    for name, value in saved_of(node).items():
        several = isinstance(value, list | tuple)
        for place, raw in enumerate(value if several else (value,)):
            if is_saved_tensor(raw):
                yield f"{name}[{place}]" if several else name, raw


def _refused_versions(node: Any, name: str, raw: Any) -> tuple[int, int] | None:
    """Request a saved tensor from autograd, and read the versions in its refusal."""
    try:
        _unpack(node, name, raw)
    except RuntimeError as error:
        found = _REFUSED.search(str(error))
        return (int(found["then"]), int(found["now"])) if found else None
    return None


def _unpack(node: Any, name: str, raw: Any) -> None:
    """Have autograd unpack a saved tensor. The node is asked where it can be, as for its own output it has to be."""
    attribute = _SAVED + name
    if hasattr(type(node), attribute):
        getattr(node, attribute)
    elif hasattr(raw, "unpack"):
        raw.unpack()
    else:  # before torch 2.12: with all others of the same name
        attribute = _SAVED + name.partition("[")[0]
        getattr(node, attribute if hasattr(type(node), attribute) else "saved_tensors")


def run_node(node: Any, incoming: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Run a node alone: no hooks, and nothing is done to what goes out. A leaf's node adds to ``.grad``.

    Args:
        node: the node.
        incoming: one gradient for each of :func:`inputs_of`.

    Raises:
        FreedGraphError: what it had saved is freed.
    """
    try:
        result = run_python(node, incoming) if is_python(node) else node(*incoming)
    except RuntimeError as error:
        if "second time" in str(error):
            raise FreedGraphError(
                f"{name_of(node)} cannot run: an earlier backward pass has freed what it had saved.",
                repair="call backward(retain_graph=True) in the pass before, or run the forward again.",
            ) from error
        raise
    return result if isinstance(result, tuple) else (result,)


def root_edges(roots: Any) -> list[tuple[Any, int]]:
    """The edges at which a backward pass from these roots begins.

    Args:
        roots: a tensor, a gradient edge, a node, or tuples, lists and dicts of them, nested as you like.

    Raises:
        NoGraphError: one of them was made by no operation that autograd recorded.
    """
    edges = list(_find_roots(roots))
    if not edges:
        raise NoGraphError(
            "There is no tensor to begin at.", repair="give the loss, or another tensor that requires grad."
        )
    return edges


def _find_roots(roots: Any) -> Iterator[tuple[Any, int]]:
    match roots:
        case Tensor():
            yield _edge_of(roots)
        case GradientEdge(node=node, output_nr=slot):
            yield node, slot
        case Mapping():
            for part in roots.values():
                yield from _find_roots(part)
        case tuple() | list():
            for part in roots:
                yield from _find_roots(part)
        case _ if hasattr(roots, "next_functions"):
            yield roots, 0
        case _:
            raise NoGraphError(
                f"A graph cannot begin at {type(roots).__name__}.",
                repair="give the loss, other tensors, edges or nodes (tensor.grad_fn), several as a list or dict.",
            )


def _edge_of(tensor: Tensor) -> tuple[Any, int]:
    if not tensor.requires_grad:
        raise NoGraphError(
            f"A tensor of shape {tuple(tensor.shape)} has no graph: it does not require grad.",
            repair="compute it with grad mode on, from parameters or inputs that require grad, without detach().",
            reason="only operations on tensors that require grad are recorded for the backward pass.",
        )
    node, slot = get_gradient_edge(tensor)[:2]
    return node, slot


def _find_saved(kind: type) -> Iterator[tuple[str, str]]:
    if issubclass(kind, torch.autograd.function.BackwardCFunction):
        yield "tensors", _RAW + "tensors"
        return
    names = dir(kind)
    for attribute in names:
        if attribute.startswith(_SAVED):
            name = attribute.removeprefix(_SAVED)
            yield name, _RAW + name if _RAW + name in names else attribute


def run_python(node: Any, incoming: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Run the node of a Python ``Function`` as the engine would.

    Returns:
        One gradient for each of the node's edges.
    """
    if any(gradient is None for gradient in incoming):
        incoming = _materialize(node, incoming)
    result = node.apply(*incoming)
    return _match_edges(node, result if isinstance(result, tuple) else (result,))


def _materialize(node: Any, incoming: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Zeros for undefined gradients. Torch does not tell the shape of an output without derivative: its is a scalar."""
    if not _wants_zeros(node):
        return list(incoming)
    return [
        torch.zeros(each.shape, dtype=each.dtype, device=each.device)
        if gradient is None and not each.is_cpp_nested_tensor
        else gradient
        for gradient, each in zip(incoming, node._input_metadata, strict=True)
    ]


def _match_edges(node: Any, result: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Match gradients, one for each argument, with edges, one for each tensor among the arguments.

    Those that need a gradient are the edges that lead somewhere, in the same order. Where some arguments are no
    tensors, it cannot be told which of the others stand for edges that lead nowhere: there it is None.
    """
    edges = node.next_functions
    wanted = node.needs_input_grad
    given = len(result)
    if given < len(wanted) or any(extra is not None for extra in result[len(wanted) :]):
        raise RuntimeError(
            f"function {type(node).__name__} returned an incorrect number of gradients "
            f"(expected {len(wanted)}, got {given})"
        )
    if len(edges) == len(wanted):
        return result[: len(edges)]
    useful = iter([gradient for gradient, needed in zip(result, wanted, strict=False) if needed])
    return tuple([next(useful, None) if following is not None else None for following, _ in edges])


def _wants_zeros(node: Any) -> bool:
    """Read what the ``Function`` set by ``set_materialize_grads``, which torch lets be set, and not be read."""
    offset = _flag_offset()
    return offset is None or ctypes.string_at(id(node) + offset, 1) != b"\0"


@functools.cache
def _flag_offset() -> int | None:
    """Where that flag lies in the memory of a node, found by setting it; None if that cannot be told."""
    sample: Any = _Sample._backward_cls()
    size = torch._C._FunctionBase.__basicsize__
    sample.set_materialize_grads(True)
    with_it = ctypes.string_at(id(sample), size)
    sample.set_materialize_grads(False)
    without = ctypes.string_at(id(sample), size)
    changed = [offset for offset in range(size) if with_it[offset] != without[offset]]
    return changed[0] if len(changed) == 1 else None


class _Sample(torch.autograd.Function):
    """Its node is only looked at."""
