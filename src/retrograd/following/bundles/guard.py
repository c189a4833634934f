"""The guard of a program that somebody else may have written: it lets an operation pass, or refuses it.

A bundle holds no code, but names of operations with their arguments; torch has operations that open files, that take
indices on trust, and that make tensors larger than the machine. So there is a list of those that may be called, and
before each call its tensors, sizes and indices are looked through.

The memory that an operation may take for its results is told from the shapes of its arguments alone. Most results are
no larger than all arguments together, or than these are when one is stretched to the shape of the other. Operations
whose results may be larger have a formula here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from math import prod
from typing import Any

import torch
from torch import Tensor

from retrograd.core.errors import UnsafeBundleError
from retrograd.core.hooks.dispatch import check_sparse
from retrograd.following.bundles.call_arguments import CallArguments
from retrograd.following.bundles.call_checks import CHECKS
from retrograd.following.bundles.copies import TensorCopies

LEAST_ROOM = 1 << 30
"""Bytes that every program may make."""

ROOM_FOR_EACH = 32
"""Bytes that a program may make for each byte that its bundle holds."""

_NEW_SPARSE = frozenset({"_sparse_coo_tensor_unsafe", "_sparse_coo_tensor_with_dims_and_tensors"})
"""Operations that make a tensor that takes no more memory than its parts."""


class CallGuard:
    """Looks at each call of one program before it is carried out.

    Args:
        stored: how many bytes the bundle holds; its program may make a multiple of that.
    """

    def __init__(self, stored: int) -> None:
        self._room = room_for(stored)
        self._left = self._room

    def check(self, name: str, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Let a call pass.

        Args:
            name: of the operation, as in ``"aten::add.Tensor"``.
            operation: the operation.
            args: what it is about to be called with.
            kwargs: likewise, by name.

        Raises:
            UnsafeBundleError: it may do harm.
        """
        refuse_unlisted(name, operation)
        try:
            given = CallArguments.bind(operation, args, kwargs)
            for tensor in given.tensors():
                if tensor.layout is not torch.strided:
                    check_sparse(tensor)
            check = CHECKS.get(_base(name))
            if check is not None:
                check(given)
            self._take(name, operation, given)
        except UnsafeBundleError:
            raise
        except Exception as error:  # an argument of another kind than the schema says, or one that torch refuses
            raise _refuse(f"{name}: {error}") from error

    def _take(self, name: str, operation: Any, given: CallArguments) -> None:
        """Count what a call makes; views take no memory, but whoever reads them takes time for each element."""
        if _base(name) in _NEW_SPARSE:
            return
        size = count_bytes(_base(name), given)
        if all(each.alias_info is None for each in operation._schema.returns):
            self._left -= size
        if size > self._room or self._left < 0:
            raise _refuse(f"{name}: with it the program makes more than {self._room} bytes")


def check_stored(copies: TensorCopies, stored: int) -> None:
    """Check that tensors of a bundle are not far larger than the bundle.

    Raises:
        UnsafeBundleError: one is: it shows the same memory many times.
    """
    if copies.largest() > room_for(stored):
        raise _refuse(f"a tensor in it has {copies.largest()} bytes, and all that is stored {stored}")


def room_for(stored: int) -> int:
    """The bytes that a program may make whose bundle holds so many."""
    return max(LEAST_ROOM, ROOM_FOR_EACH * stored)


def refuse_unlisted(name: str, operation: Any) -> None:
    """Check that an operation is one that computes.

    Raises:
        UnsafeBundleError: it is not on the list.
    """
    namespace, _, rest = name.partition("::")
    if namespace != "aten":
        raise _refuse(f"{name}: it is not one of torch's own")
    is_listed = rest in read_allowed() or (_base(name) in read_allowed() and not _writes_out(operation))
    if not is_listed or not _is_of_tensors(operation):
        raise _refuse(f"{name}: it is not among those that only compute")


@cache
def read_allowed() -> frozenset[str]:
    """The operations that may be called: without their overloads, or with them."""
    text = resources.files("retrograd.following.bundles").joinpath("operations.txt").read_text(encoding="utf-8")
    return frozenset(word for line in text.splitlines() if not line.startswith("#") for word in line.split())


def _base(name: str) -> str:
    return name.partition("::")[2].partition(".")[0]


def _writes_out(operation: Any) -> bool:
    """Tell whether an operation writes into a tensor given as ``out=``, which it may resize."""
    return any(each.kwarg_only and each.alias_info is not None for each in operation._schema.arguments)


def _is_of_tensors(operation: Any) -> bool:
    """Tell whether an operation takes or gives tensors: some names stand for operations on texts and lists too."""
    schema = operation._schema
    gives = any(str(each.type) in {"Tensor", "List[Tensor]"} for each in schema.returns)
    return gives or (bool(schema.arguments) and str(schema.arguments[0].type) == "Tensor")


def _refuse(what: str) -> UnsafeBundleError:
    return UnsafeBundleError(
        f"The bundle asks for what may do harm: {what}.",
        repair="if you know who wrote it, replay it with trusted=True, or `retrograd replay --trust`.",
        reason="operations of torch can write to files, and read and write past the ends of tensors.",
    )


# ---- growth ----

_PART = 64
"""Elements that take as much memory as the object that a part of a tensor is."""

_SIZES = ("size", "input_sizes", "output_size")
"""Arguments that tell the shape of a result."""


def count_bytes(name: str, given: CallArguments) -> int:
    """The most bytes that a result of an operation can have, and what it reads if that is more.

    Args:
        name: of the operation, without its overload.
        given: its arguments by their names.
    """
    dtypes = [each.dtype for each in given.tensors()]
    dtypes += [each for each in given.values() if isinstance(each, torch.dtype)]
    return max([8, *(each.itemsize for each in dtypes)]) * _count_elements(name, given)


def _count_elements(name: str, given: CallArguments) -> int:
    tensors = list(given.tensors())
    usual = max([0, _stretch(tensors), sum(each.numel() for each in tensors), *map(_amount, _sizes_in(given))])
    formula = _FORMULAS.get(name)
    return usual if formula is None else max(usual, formula(given))


def _multiply_all(numbers: Iterable[int]) -> int:
    return int(prod(numbers))


def _stretch(tensors: Sequence[Tensor]) -> int:
    """Elements of the shape that all of them have when they are stretched, or more."""
    lengths: dict[int, int] = {}
    for tensor in tensors:
        for place, length in enumerate(reversed(tensor.shape)):
            lengths[place] = max(lengths.get(place, 0), length)
    return _multiply_all(lengths.values())


def _sizes_in(given: CallArguments) -> list[Sequence[int]]:
    return [given[name] for name in _SIZES if isinstance(given.get(name), list | tuple)]


def _multiply(*names: str) -> Callable[[CallArguments], int]:
    """Multiply these arguments: the elements of a tensor, a number, or all numbers of a list."""
    return lambda given: _multiply_all(_amount(given[name]) for name in names if given.get(name) is not None)


def _amount(value: Any) -> int:
    match value:
        case Tensor():
            return value.numel()
        case list() | tuple():
            return _multiply_all(max(abs(int(each)), 1) for each in value)
        case _:
            return abs(int(value)) + 1


def _count_product(one: str, other: str, also: str = "") -> Callable[[CallArguments], int]:
    """Rows of one matrix times columns of the other, for each of a batch."""

    def count(given: CallArguments) -> int:
        left, right = given[one], given[other]
        batch = _multiply_all(left.shape[:-2]) or 1
        return max(batch * int(left.shape[-2] * right.shape[-1]), int(given[also].numel()) if also else 0)

    return lambda given: count(given) if min(given[one].dim(), given[other].dim()) >= 2 else 0


def _count_square(name: str) -> Callable[[CallArguments], int]:
    """The square of the longer side of a matrix, for each of a batch."""
    return lambda given: _multiply_all(given[name].shape[:-2]) * max(given[name].shape[-2:], default=0) ** 2


def _count_picked(given: CallArguments) -> int:
    """Rows that are picked by index tensors, times the size of one."""
    rest, lengths = list(given["self"].shape), []
    picked: list[Tensor] = []
    for index in given["indices"]:
        taken = index.dim() if index is not None and index.dtype in {torch.bool, torch.uint8} else 1
        lengths += rest[:taken] if index is None else []
        rest = rest[taken:]
        if index is not None:
            picked.append(index.reshape(-1) if taken != 1 else index)
    return _stretch(picked) * _multiply_all(lengths) * _multiply_all(rest)


def _count_rows(table: str, index: str, dim: str = "") -> Callable[[CallArguments], int]:
    def count(given: CallArguments) -> int:
        tensor, place = given[table], given[dim] if dim else 0
        is_there = -tensor.dim() <= place < tensor.dim()
        length = max(tensor.shape[place], 1) if is_there else 1
        return int(given[index].numel()) * int(tensor.numel() // length)

    return count


def _count_padded(name: str) -> Callable[[CallArguments], int]:
    def count(given: CallArguments) -> int:
        shape, pad = list(given["self"].shape), list(given[name])
        for index in range(0, len(pad) - 1, 2):
            place = -1 - index // 2
            if len(shape) >= -place:
                shape[place] = max(shape[place] + pad[index] + pad[index + 1], 0)
        return _multiply_all(shape)

    return count


def _count_resized(name: str) -> Callable[[CallArguments], int]:
    """Samples and channels, times the size that is asked for."""
    return lambda given: _multiply_all(given[name].shape[:2]) * _amount(given["output_size"])


def _count_convolved(given: CallArguments) -> int:
    """Elements of a convolution's result, and of the columns that it may make of its input."""
    source, weight, spatial = given["input"], given["weight"], given["input"].dim() - 2
    if spatial < 1 or weight.dim() != source.dim():
        return 0
    wide = [
        length * max(stride, 1) + 2 * abs(padding) + dilation * kernel + abs(extra)
        if given["transposed"]
        else (length + 2 * abs(padding)) // max(stride, 1) + 1
        for length, kernel, stride, padding, dilation, extra in zip(
            source.shape[2:],
            weight.shape[2:],
            *(_fill(given[name], spatial) for name in ("stride", "padding", "dilation", "output_padding")),
            strict=True,
        )
    ]
    channels = weight.shape[1] * max(given["groups"], 1) if given["transposed"] else weight.shape[0]
    return int(source.shape[0] * channels * _multiply_all(wide))


def _fill(values: Sequence[int], length: int) -> list[int]:
    return (list(values) * length)[:length] if len(values) == 1 else [*values, *[1] * length][:length]


def _count_distances(given: CallArguments) -> int:
    one, other = given["x1"], given["x2"]
    if min(one.dim(), other.dim()) < 2:
        return 0
    shapes = one.shape[:-2], other.shape[:-2]
    batch = _stretch([torch.empty(shape, device="meta") for shape in shapes])
    return batch * int(one.shape[-2]) * int(other.shape[-2])


def _count_sampled(given: CallArguments) -> int:
    source, grid = given["input"], given["grid"]
    return _multiply_all(source.shape[:2]) * _multiply_all(grid.shape[1:-1])


def _count_steps(given: CallArguments) -> int:
    start, step = given.get("start", 0), given.get("step", 1)
    return int(abs((given["end"] - start) / step)) + 1 if step else 0


def _count_embedded(given: CallArguments) -> int:
    side = given["self"].shape[-1] if given["self"].dim() else 1
    return int((given["self"].numel() or 1) * (side + abs(given["offset"])) ** 2 // max(side, 1))


def _count_strided(given: CallArguments) -> int:
    return 1 + sum(abs(int(length) * int(step)) for length, step in zip(given["size"], given["stride"], strict=False))


def _count_parts(given: CallArguments) -> int:
    """Count the memory of the tensor objects that a tensor is split into."""
    self, dim, size = given["self"], given.get("dim", 0), given.get("split_size", 1)
    length = int(self.shape[dim]) if -self.dim() <= dim < self.dim() else 0
    return _PART * length // max(int(size), 1) if isinstance(size, int) else 0


def _count_pooled(name: str) -> Callable[[CallArguments], int]:
    """Padding makes it larger, and everything else smaller."""
    return lambda given: _multiply_all(given[name].shape) * _amount(given["padding"])


_FORMULAS: dict[str, Callable[[CallArguments], int]] = {
    "_cdist_forward": _count_distances,
    "_ctc_loss": lambda given: _multiply_all(given["log_probs"].shape[:2]) * (2 * given["targets"].numel() + 1),
    "_embedding_bag": _count_rows("weight", "offsets"),
    "_embedding_bag_backward": lambda given: given["num_weights"] * given["grad"].shape[-1],
    "_fft_c2r": _multiply("self", "last_dim_size"),
    "_linalg_svd": _count_square("A"),
    "_to_sparse": lambda given: given["self"].numel() * (given["self"].dim() + 1),
    "_trilinear": _multiply("i1", "i2", "i3"),
    "_upsample_bicubic2d_aa": _count_resized("self"),
    "_upsample_bilinear2d_aa": _count_resized("self"),
    "_unsafe_masked_index": _count_picked,
    "addbmm": _count_product("batch1", "batch2", "self"),
    "addbmm_": _count_product("batch1", "batch2", "self"),
    "addmm": _count_product("mat1", "mat2", "self"),
    "addmm_": _count_product("mat1", "mat2", "self"),
    "addr": _multiply("vec1", "vec2"),
    "addr_": _multiply("vec1", "vec2"),
    "arange": _count_steps,
    "avg_pool1d": _count_pooled("self"),
    "avg_pool2d": _count_pooled("self"),
    "avg_pool3d": _count_pooled("self"),
    "baddbmm": _count_product("batch1", "batch2", "self"),
    "baddbmm_": _count_product("batch1", "batch2", "self"),
    "block_diag": lambda given: sum(max(each.numel(), 1) for each in given["tensors"]) ** 2,
    "bmm": _count_product("self", "mat2"),
    "col2im": _multiply("self", "output_size"),
    "constant_pad_nd": _count_padded("pad"),
    "convolution": _count_convolved,
    "diag_embed": _count_embedded,
    "embedding": _count_rows("weight", "indices"),
    "empty_strided": _count_strided,
    "new_empty_strided": _count_strided,
    "embedding_dense_backward": lambda given: given["num_weights"] * given["grad_output"].shape[-1],
    "expand": _multiply("self", "size"),
    "eye": _multiply("n", "m"),
    "full": _multiply("size"),
    "grid_sampler_2d": _count_sampled,
    "grid_sampler_3d": _count_sampled,
    "im2col": _multiply("self", "kernel_size", "padding"),
    "index": _count_picked,
    "index_put": _count_picked,
    "index_put_": _count_picked,
    "index_select": _count_rows("self", "index", "dim"),
    "linalg_cross": lambda given: _stretch([given["self"], given["other"]]),
    "linalg_householder_product": _count_square("input"),
    "linalg_lu": _count_square("A"),
    "linalg_pinv": _count_square("self"),
    "linalg_qr": _count_square("A"),
    "linspace": _multiply("steps"),
    "logspace": _multiply("steps"),
    "lu_unpack": _count_square("LU_data"),
    "max_unpool2d": _multiply("self", "output_size"),
    "max_unpool3d": _multiply("self", "output_size"),
    "mm": _count_product("self", "mat2"),
    "multinomial": _multiply("self", "num_samples"),
    "nonzero": lambda given: given["self"].numel() * given["self"].dim(),
    "randperm": _multiply("n"),
    "repeat": _multiply("self", "repeats"),
    "split": _count_parts,
    "tril_indices": _multiply("row", "col"),
    "triu_indices": _multiply("row", "col"),
    "unbind": _count_parts,
    "unbind_copy": _count_parts,
    "unsafe_split": _count_parts,
    "unfold": _multiply("self", "size"),
    "unfold_copy": _multiply("self", "size"),
    "_unsafe_masked_index_put_accumulate": _count_picked,
    **{
        f"{kind}_pad{spatial}d": _count_padded("padding")
        for kind in ("reflection", "replication")
        for spatial in (1, 2, 3)
    },
    **{
        f"upsample_{kind}": _count_resized("self")
        for kind in ("bicubic2d", "bilinear2d", "linear1d", "nearest1d", "nearest2d", "nearest3d", "trilinear3d")
    },
    **{f"_upsample_nearest_exact{spatial}d": _count_resized("self") for spatial in (1, 2, 3)},
}  # fmt: skip
"""Operation, without its overload → the most elements of a result."""
