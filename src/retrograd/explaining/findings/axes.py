"""Where each dimension of each result comes from: batch, sequence and features, followed through operations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from retrograd.core.groups import reach
from retrograd.explaining.findings.chain import LOSSES, VIEWS, Chain, argument_of, shape_of, tensor_of
from retrograd.explaining.findings.record import Record

Shape = tuple[int, ...]


class Atom(NamedTuple):
    """What a dimension was before it was merged with others.

    Attributes:
        root: number of the dimension in which it began.
        size: how many elements it has here.
    """

    root: int
    size: int


Dim = tuple[Atom, ...]
"""The atoms that a dimension is merged of, the slowest first; empty where its size is 1."""

Axes = tuple[Dim, ...]

_SAME_RANK = frozenset(
    {
        "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "max_pool1d", "max_pool2d", "avg_pool1d",
        "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d",
        "interpolate", "pad", "index_select", "topk", "repeat", "tile", "narrow", "chunk", "split", "tensor_split",
        "repeat_interleave", "gather", "take_along_dim", "split_with_sizes"
    }
)  # fmt: skip
"""Functions that change sizes of dimensions and leave them in their places."""

_REDUCE = frozenset(
    {"sum", "mean", "max", "min", "amax", "amin", "logsumexp", "prod", "std", "var", "norm", "argmax", "argmin", "any",
     "all", "median", "nansum", "nanmean"}
)  # fmt: skip

_NOT_IN_PLACE = frozenset({"cdist", "outer", "ger", "cov", "corrcoef", "inverse", "kron", "meshgrid", "bilinear"})
"""Functions the result of which may have an operand's shape without having its dimensions."""

RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})

ATTENTION = "multi_head_attention_forward"

ARANGE = frozenset({"arange", "range", "linspace"})


class AxisTable:
    """The dimensions of what the operations of a chain take and make.

    A dimension that is not known is one of its own, which is equal to no other.

    Args:
        chain: the operations.
        inputs: the tensors that models were called with, as ``float32[4, 3]``.

    Attributes:
        ranges: roots that ``arange`` has made.
        features: roots that a layer has made.
        mixed: numbers of the reshapes that tear dimensions apart.
        compared: dimensions of what is compared with targets.
        targeted: roots of inputs, by whose entries outputs are compared with targets.
        batch: roots of samples: inputs' dimensions in the place of these, in the first where they are not known.
    """

    def __init__(self, chain: Chain, inputs: Iterable[str] = ()) -> None:
        self._chain, self._inputs = chain, frozenset(inputs)
        self._parents: list[tuple[int, ...]] = []
        self._given: dict[tuple[str, int], int] = {}
        self._parts: dict[tuple[Atom, int], tuple[Atom, Atom]] = {}
        self.ranges, self.features, self.mixed = set[int](), set[int](), set[int]()
        self._of_inputs = {
            self._root_of(each, place): place for each in self._inputs for place in range(len(shape_of(each) or ()))
        }
        self._made: list[list[Axes]] = []
        for number in range(len(chain)):
            self._made.append(self._follow(number))
        self.compared = [self.taken(*each) for each in _list_compared(chain)]
        samples = [self.samples_of(each) for each in self.compared]
        self.targeted = frozenset[int]().union(*(each for each in samples if len(each) == 1))
        places = {self._of_inputs[root] for root in self.targeted} or {0}
        self.batch = {root for root, place in self._of_inputs.items() if place in places}

    # ---- what is asked ----

    def of(self, number: int) -> Axes:
        """The dimensions of what an operation made."""
        return self._made[number][0] if self._made[number] else ()

    def taken(self, number: int, operand: int = 0) -> Axes:
        """The dimensions of an operand, all unknown where its shape is."""
        listed = self._chain.listed[number]
        shape = self._chain.taken(number, operand)
        if shape is None:
            return ()
        maker = listed.operands[operand] if operand < len(listed.operands) else -1
        if 0 <= maker < number:
            text = listed.takes[operand]
            for made, axes in zip(self._chain.listed[maker].makes, self._made[maker], strict=False):
                if made == text or shape_of(made) == shape:
                    return axes
            return self._unknown(shape)
        text = listed.takes[operand]
        return tuple(() if size == 1 else (Atom(self._root_of(text, place), size),) for place, size in enumerate(shape))

    def roots(self, dims: Iterable[Atom]) -> frozenset[int]:
        """The roots of atoms, and of what these were parts of."""
        return frozenset(reach((each.root for each in dims), lambda root: self._parents[root]))

    def is_batch(self, dim: Dim) -> bool:
        """Check whether samples are in a dimension."""
        return bool(self.roots(dim) & self.batch)

    def is_of_inputs(self, dim: Dim) -> bool:
        """Check whether a dimension was one of what a model was called with."""
        return not self.roots(dim).isdisjoint(self._of_inputs)

    def samples_of(self, axes: Axes) -> frozenset[int]:
        """The dimensions of inputs that are in the first one."""
        return self.roots(axes[0]) & self._of_inputs.keys() if axes else frozenset()

    def descends(self, later: Dim, earlier: Dim) -> bool:
        """Check whether a dimension is one that was there before, or holds some of it."""
        return not self.roots(later).isdisjoint(each.root for each in earlier)

    def is_free(self, number: int, operand: int) -> bool:
        """Check whether an operand is made of nothing that a model was called with."""
        listed = self._chain.listed[number]
        maker = listed.operands[operand]
        if maker >= 0:
            return maker not in self._fed
        return operand >= len(listed.takes) or listed.takes[operand] not in self._inputs

    @cached_property
    def _fed(self) -> frozenset[int]:
        """The operations that are made of what a model was called with."""
        begun = tuple(
            number
            for number, each in enumerate(self._chain.listed)
            if any(maker < 0 and text in self._inputs for maker, text in zip(each.operands, each.takes, strict=False))
        )
        return self._chain.descendants(begun).union(begun)

    # ---- how it is found ----

    def _new(self, parents: Iterable[int] = ()) -> int:
        self._parents.append(tuple(parents))
        return len(self._parents) - 1

    def _root_of(self, text: str, place: int) -> int:
        """The root of a dimension of a tensor made before; tensors of one description share theirs."""
        if (text, place) not in self._given:
            self._given[text, place] = self._new()
        return self._given[text, place]

    def _unknown(self, shape: Shape) -> Axes:
        return tuple(self._fresh(size) for size in shape)

    def _feature(self, size: int) -> Dim:
        """A dimension that a layer makes."""
        found = self._fresh(size)
        self.features |= {each.root for each in found}
        return found

    def _fresh(self, size: int, parents: Iterable[int] = ()) -> Dim:
        return () if size == 1 else (Atom(self._new(parents), size),)

    def _follow(self, number: int) -> list[Axes]:
        listed = self._chain.listed[number]
        shapes = [shape_of(each) for each in listed.makes]
        return [() if shape is None else self._fit(self._infer(number, shape, place), shape)
                for place, shape in enumerate(shapes)]  # fmt: skip

    def _fit(self, axes: Axes | None, shape: Shape) -> Axes:
        """Dimensions with these sizes: what has another one is a part of what it was, or larger."""
        if axes is None or len(axes) != len(shape):
            return self._unknown(shape)
        return tuple(self._resize(dim, size) for dim, size in zip(axes, shape, strict=True))

    def _resize(self, dim: Dim, size: int) -> Dim:
        if size == 1 or math.prod(each.size for each in dim) == size:
            return () if size == 1 else dim
        return (Atom(dim[0].root, size),) if len(dim) == 1 else self._fresh(size, (each.root for each in dim))

    def _infer(self, number: int, shape: Shape, place: int) -> Axes | None:
        """Dimensions of a result, before their sizes are fitted; None where they are not known."""
        name = self._chain.name(number)
        if name in ARANGE:
            axes = self._unknown(shape)
            self.ranges |= {each.root for dim in axes for each in dim}
            return axes
        if not self._chain.listed[number].takes or name in _NOT_IN_PLACE or name.endswith("_like"):
            return None
        rule = _RULES.get(name)
        if rule is not None:
            return rule(self, number, shape, place)
        axes = self.taken(number)
        if name in _SAME_RANK and len(axes) == len(shape):
            is_layer = name.startswith("conv")
            return (axes[0], self._feature(shape[1]), *axes[2:]) if is_layer and len(axes) > 2 else axes
        return self._align(number, shape)

    def _align(self, number: int, shape: Shape) -> Axes | None:
        """Dimensions of an elementwise function: of the first operand that is as long in each."""
        given = [self._chain.taken(number, each) for each in range(len(self._chain.listed[number].takes))]
        rank = len(shape)
        fits = [each for each, taken in enumerate(given) if taken is not None and _broadcasts_to(taken, shape)]
        if not fits:
            return None
        found = []
        for dim in range(rank):
            known = ((self.taken(number, each), len(given[each] or ())) for each in fits)
            longest = (axes[dim - rank + size] for axes, size in known if dim - rank + size >= 0)
            found.append(next((one for one in longest if one), ()))
        is_whole = all(bool(one) or size == 1 for one, size in zip(found, shape, strict=True))
        return tuple(found) if is_whole else None

    def _reshape(self, number: int, shape: Shape, _: int) -> Axes | None:
        rest = [atom for dim in reversed(self.taken(number)) for atom in reversed(dim)]
        found = []
        for size in shape:
            dim, left = list[Atom](), size
            while left > 1:
                if not rest:
                    return None
                atom = rest.pop()
                if atom.size > left and atom.size % left == 0:
                    atom, second = self._split(atom, left)
                    rest.append(second)
                if left % atom.size:
                    self.mixed.add(number)
                    return None
                dim.append(atom)
                left //= atom.size
            found.append(tuple(dim))
        return tuple(found)

    def _split(self, atom: Atom, size: int) -> tuple[Atom, Atom]:
        if (atom, size) not in self._parts:
            first, second = Atom(self._new((atom.root,)), size), Atom(self._new((atom.root,)), atom.size // size)
            self._parts[atom, size] = first, second
        return self._parts[atom, size]

    def _turn(self, number: int, shape: Shape, _: int) -> Axes | None:
        axes, name = self.taken(number), self._chain.name(number)
        rank = len(axes)
        if (name in ("t", "T") and rank == 2) or (name in ("mT", "mH") and rank >= 2):
            return (*axes[:-2], axes[-1], axes[-2])
        places = numbers_of(self._chain.listed[number].arguments)
        if name in ("transpose", "swapaxes", "swapdims") and len(places) == 2:
            order = list(range(rank))
            first, second = (each % rank for each in places)
            order[first], order[second] = second, first
            return tuple(axes[each] for each in order)
        if name == "permute" and len(places) == rank:
            return tuple(axes[each % rank] for each in places)
        if name == "movedim" and len(places) == 2:
            order = [each for each in range(rank) if each != places[0] % rank]
            order.insert(places[1] % rank, places[0] % rank)
            return tuple(axes[each] for each in order)
        return None

    def _reduce(self, number: int, shape: Shape, _: int) -> Axes | None:
        axes = self.taken(number)
        if len(shape) == len(axes):
            return axes
        gone = reduced_places(self._chain, number)
        return None if gone is None else tuple(dim for place, dim in enumerate(axes) if place not in gone)

    def _squeeze(self, number: int, shape: Shape, _: int) -> Axes | None:
        """Those that are longer than 1 stay in their order, whichever is added or taken away."""
        rest = [dim for dim in self.taken(number) if dim]
        return tuple(() if size == 1 or not rest else rest.pop(0) for size in shape)

    def _expand(self, number: int, shape: Shape, _: int) -> Axes | None:
        axes = self.taken(number)
        front = len(shape) - len(axes)
        padded = (*((),) * front, *axes)
        return tuple(dim or self._fresh(size) for dim, size in zip(padded, shape, strict=False))

    def _index(self, number: int, shape: Shape, _: int) -> Axes | None:
        text, axes = self._chain.listed[number].arguments.strip(), self.taken(number)
        tensors = len(self._chain.listed[number].takes) - 1
        parts = _parts_of(text) if text else ["tensor"] if tensors else ["None"]
        left = len(axes) - sum(each not in ("None", "...") for each in parts)
        if left < 0 or parts.count("tensor") != tensors or tensors > 1:
            return None
        rest, found = list(axes), list[Dim]()
        for part in parts if "..." in parts else [*parts, "..."]:
            if part == "...":
                found += rest[:left]
                del rest[:left]
            elif part == "None":
                found.append(())
            else:
                found += self._pick(number, part, rest.pop(0))
        return tuple(found)

    def _pick(self, number: int, part: str, dim: Dim) -> Axes:
        """What an index makes of a dimension: a slice keeps it, a number takes it away."""
        if part == "tensor":
            return self.taken(number, 1)
        return (dim,) if ":" in part else ()

    def _select(self, number: int, shape: Shape, _: int) -> Axes | None:
        axes, places = self.taken(number), numbers_of(self._chain.listed[number].arguments)
        name = self._chain.name(number)
        dim = places[0] % len(axes) if places and axes else 0
        if name == "select" and len(places) != 2:
            return None
        return tuple(each for place, each in enumerate(axes) if place != dim)

    def _join(self, number: int, shape: Shape, _: int) -> Axes | None:
        """Dimensions of the first, and of the others in the same places."""
        listed = self._chain.listed[number]
        given = [self.taken(number, each) for each in range(len(listed.takes))]
        rank = len(given[0])
        if any(len(each) != rank for each in given):
            return None
        axes = tuple(self._merge(dims) for dims in zip(*given, strict=True))
        if self._chain.name(number) != "stack":
            return axes
        places = numbers_of(re.sub(r"\(.*?\)", "", listed.arguments))
        place = places[0] % len(shape) if places else 0
        return (*axes[:place], self._fresh(shape[place]), *axes[place:])

    def _merge(self, dims: Sequence[Dim]) -> Dim:
        first = max(dims, key=lambda dim: math.prod(each.size for each in dim))
        if all(dim == first for dim in dims):
            return first
        size = math.prod(each.size for each in first)
        return self._fresh(size, (each.root for dim in dims for each in dim))

    def _normalise(self, number: int, shape: Shape, _: int) -> Axes | None:
        """The operand's, told from them: rows and columns of scores may be one dimension."""
        return tuple(self._fresh(size, (each.root for each in dim))
                     for dim, size in zip(self.taken(number), shape, strict=False))  # fmt: skip

    def _linear(self, number: int, shape: Shape, _: int) -> Axes | None:
        operand = 1 if self._chain.name(number) in ("addmm", "baddbmm") else 0
        return (*self.taken(number, operand)[:-1], self._feature(shape[-1])) if shape else None

    def _embed(self, number: int, shape: Shape, _: int) -> Axes | None:
        return (*self.taken(number), self._feature(shape[-1]))

    def _multiply(self, number: int, shape: Shape, _: int) -> Axes | None:
        first, second = self.taken(number), self.taken(number, 1)
        if not first or not second:
            return None
        rows, columns = first[-2:-1], second[-1:] if len(second) > 1 else ()
        front = max(first[:-2], second[:-2], key=len)
        other = min(first[:-2], second[:-2], key=len)
        padded = (*((),) * (len(front) - len(other)), *other)
        return (*(one or two for one, two in zip(front, padded, strict=True)), *rows, *columns)

    def _einsum(self, number: int, shape: Shape, _: int) -> Axes | None:
        parts = equation_of(self._chain, number)
        if parts is None:
            return None
        letters: dict[str, Dim] = {}
        for operand, names in enumerate(parts[:-1]):
            for name, dim in zip(names, self.taken(number, operand), strict=False):
                letters[name] = letters.get(name) or dim
        return tuple(letters.get(each, ()) for each in parts[-1])

    def _recur(self, number: int, shape: Shape, place: int) -> Axes | None:
        axes = self.taken(number)
        if len(axes) != 3:
            return None
        batch = axes[0 if is_batch_first(self._chain, number) else 1]
        return (
            (*axes[:2], self._feature(shape[-1]))
            if place == 0
            else (self._fresh(shape[0]), batch, self._fresh(shape[-1]))
        )

    def _attend(self, number: int, shape: Shape, place: int) -> Axes | None:
        query, key = self.taken(number), self.taken(number, 1)
        if self._chain.name(number) != ATTENTION:
            value = self.taken(number, 2)
            return (*query[:-1], *value[-1:])
        if len(query) != 3:
            return None
        return (query[0], query[1], self._feature(shape[-1])) if place == 0 else (query[1], query[0], key[0])


Rule = Callable[[AxisTable, int, Shape, int], Axes | None]

_RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel"), AxisTable._reshape),
    **dict.fromkeys(("permute", "transpose", "swapaxes", "swapdims", "movedim"), AxisTable._turn),
    **dict.fromkeys(("t", "T", "mT", "mH", "H"), AxisTable._turn),
    **dict.fromkeys(_REDUCE, AxisTable._reduce),
    **dict.fromkeys(("squeeze", "unsqueeze"), AxisTable._squeeze),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), AxisTable._expand),
    **dict.fromkeys(("getitem",), AxisTable._index),
    **dict.fromkeys(("select", "unbind"), AxisTable._select),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), AxisTable._join),
    **dict.fromkeys(("softmax", "normalize"), AxisTable._normalise),
    **dict.fromkeys(("linear", "addmm", "baddbmm"), AxisTable._linear),
    **dict.fromkeys(("embedding",), AxisTable._embed),
    **dict.fromkeys(("matmul", "mm", "bmm"), AxisTable._multiply),
    **dict.fromkeys(("einsum",), AxisTable._einsum),
    **dict.fromkeys(RECURRENT, AxisTable._recur),
    **dict.fromkeys((ATTENTION, "scaled_dot_product_attention"), AxisTable._attend),
}  # fmt: skip


def _list_compared(chain: Chain) -> list[tuple[int, int]]:
    """Where what the model gave meets what it did not: numbers of operations, and of that operand."""
    of_model = chain.of_outputs | chain.behind_outputs
    found = []
    for number in range(len(chain)):
        operands = chain.listed[number].operands[:2]
        is_loss = chain.name(number) in LOSSES or (
            chain.name(number) in ("sub", "rsub", "gather") and number in chain.behind_outputs
        )
        if len(operands) == 2 and is_loss and sum(each in of_model for each in operands) == 1:
            place = 0 if operands[0] in of_model else 1
            given, other = chain.taken(number, place), chain.taken(number, 1 - place)
            if given and other and given[0] == other[0] > 1:
                found.append((number, place))
    return found


def numbers_of(text: str) -> list[int]:
    """The whole numbers among arguments, named or not, also those within a tuple."""
    return [int(each) for each in re.findall(r"(?<![\w.])-?\d+(?![\w.])", text)]


def reduced_places(chain: Chain, number: int) -> frozenset[int] | None:
    """The dimensions that a reduction runs along, counted from 0; all where none is named, None where not known."""
    shape, text = chain.taken(number), argument_of(chain.listed[number], "dim")
    if shape is None:
        return None
    if text is None:
        return frozenset(range(len(shape))) if not chain.made(number) else None
    return frozenset(each % len(shape) for each in numbers_of(text)) if shape else frozenset()


def equation_of(chain: Chain, number: int) -> list[str] | None:
    """The letters of each operand of an einsum, and of its result; None where they are not plain."""
    found = re.search(r"([a-zA-Z, ]+)->([a-zA-Z ]*)", chain.listed[number].arguments)
    if found is None:
        return None
    return [each.replace(" ", "") for each in (*found[1].split(","), found[2])]


def is_batch_first(chain: Chain, number: int) -> bool:
    """Check of a recurrent layer whether its first dimension is the batch."""
    return chain.listed[number].arguments.rstrip(") ").endswith("True")


def _parts_of(text: str) -> list[str]:
    """The parts of an index: ``:``, ``-1``, ``None``, ``...`` or ``tensor``."""
    inner = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    return [each.strip() for each in inner.rstrip(", ").split(",")]


def _broadcasts_to(taken: Sequence[int], shape: Shape) -> bool:
    if len(taken) > len(shape):
        return False
    return all(one in (1, other) for one, other in zip(reversed(taken), reversed(shape), strict=False))


def axes_of(record: Record, chain: Chain) -> AxisTable:
    """The dimensions of a chain of a record."""
    return record.once(_follow_all)[id(chain)]


def _follow_all(record: Record) -> dict[int, AxisTable]:
    inputs = dict.fromkeys(tensor_of(look) for looks in record.inputs.values() for look in looks)
    return {id(chain): AxisTable(chain, inputs) for chain in record.chains}


# ---- what becomes of a dimension ----

_CARRIERS = VIEWS | {"dropout", "cat", "concat", "stack", "masked_fill", "nan_to_num", "index_select", "half"}


class Contraction(NamedTuple):
    """A sum over a dimension of what an operation made.

    Attributes:
        number: the operation that sums, or that picks the largest.
        dim: the dimension, as it is there.
        kind: ``product`` where it is the first factor of a matrix product, ``products`` the second, ``weights`` where
            it is multiplied and summed, ``pick`` where the largest is taken.
    """

    number: int
    dim: Dim
    kind: str


def find_contractions(table: AxisTable, chain: Chain, number: int) -> list[Contraction] | None:
    """Over which dimension products with a tensor are summed; None where something else is made of it."""
    found: list[Contraction] = []
    for user in chain.users(number):
        if user not in chain.of_loss:
            continue
        for place, operand in enumerate(chain.listed[user].operands):
            if operand == number:
                more = _contract(table, chain, user, place)
                if more is None:
                    return None
                found += more
    return found


def _contract(table: AxisTable, chain: Chain, user: int, place: int) -> list[Contraction] | None:
    name, axes = chain.name(user), table.taken(user, place)
    is_scaled = name in ("mul", "div") and len(chain.listed[user].operands) == 1
    if name in _CARRIERS or is_scaled:
        return find_contractions(table, chain, user)
    if name in ("matmul", "mm", "bmm") and len(axes) > 1:
        return [Contraction(user, axes[-1 if place == 0 else -2], "product" if place == 0 else "products")]
    if name == "einsum" and (parts := equation_of(chain, user)) is not None and place < len(parts) - 1:
        summed = [dim for letter, dim in zip(parts[place], axes, strict=False) if letter not in parts[-1]]
        return [Contraction(user, dim, "product" if place == 0 else "products") for dim in summed] or None
    if name == "mul":
        return _sum_products(chain, user, axes)
    if name in PICKING and (gone := reduced_places(chain, user)) is not None:
        return [Contraction(user, axes[each], "pick") for each in gone]
    return None


def _sum_products(chain: Chain, number: int, axes: Axes) -> list[Contraction] | None:
    found = []
    front = len(chain.made(number)) - len(axes)
    for user in chain.users(number):
        gone = reduced_places(chain, user) if chain.name(user) in ("sum", "mean") else None
        if gone is None or min(gone, default=-1) < front:
            return None
        found += [Contraction(user, axes[each - front], "weights") for each in gone]
    return found


PICKING = ("max", "topk", "argmax")
"""Functions by which a gate picks experts."""


# ---- what runs along a sequence ----


class Attended(NamedTuple):
    """A layer that runs along a dimension.

    Attributes:
        number: its operation.
        along: the dimension along which it runs.
        apart: the dimensions whose entries it does not mix.
        is_ordered: it knows the order of entries, as a recurrent layer does.
    """

    number: int
    along: Dim
    apart: Axes
    is_ordered: bool = False


def find_attended(table: AxisTable, chain: Chain) -> list[Attended]:
    """The layers of attention and the recurrent ones, in order."""
    return [found for number in range(len(chain)) if (found := _read_attended(table, chain, number)) is not None]


def _read_attended(table: AxisTable, chain: Chain, number: int) -> Attended | None:
    name = chain.name(number)
    if name in RECURRENT and len(axes := table.taken(number)) == 3:
        along = 1 if is_batch_first(chain, number) else 0
        return Attended(number, axes[along], (axes[1 - along],), is_ordered=True)
    if name == ATTENTION and len(axes := table.taken(number, 1)) == 3:
        return Attended(number, axes[0], (axes[1],))
    if name == "scaled_dot_product_attention" and len(axes := table.taken(number, 1)) > 2:
        return Attended(number, axes[-2], axes[:-2])
    if name == "softmax" and len(axes := table.of(number)) > 2:
        products = [each for each in find_contractions(table, chain, number) or () if each.kind == "product"]
        dims = [dim for dim in axes for each in products if table.descends(each.dim, dim)]
        return Attended(number, dims[0], axes[:-2]) if dims and dims[0] == axes[-1] else None
    return None


class Code(NamedTuple):
    """Something that is added to what the layers work on, and is not made of the model's inputs.

    Attributes:
        number: the operation that adds it.
        operand: which of its operands it is.
        axes: the dimensions of the sum.
        varies: the places, but for the last, in which it is not the same for all.
    """

    number: int
    operand: int
    axes: Axes
    varies: tuple[int, ...]


def find_codes(table: AxisTable, chain: Chain) -> list[Code]:
    """What is added to activations of three or more dimensions, in the model; what multiplies them, too."""
    found = []
    for number in sorted(chain.of_outputs):
        shape, takes = chain.made(number), chain.listed[number].takes
        if chain.name(number) not in ("add", "mul") or len(takes) != 2 or len(shape) < 3:
            continue
        free = [place for place in (0, 1) if table.is_free(number, place)]
        if len(free) == 1 and (given := chain.taken(number, free[0])) is not None:
            front = len(shape) - len(given)
            varies = tuple(front + place for place, size in enumerate(given[:-1]) if size > 1)
            found.append(Code(number, free[0], table.of(number), varies))
    return found
