"""The guard of a program that somebody else may have written: it lets an operation pass, or refuses it.

A bundle holds no code, but names of operations with their arguments; torch has operations that open files, that take
indices on trust, and that make tensors larger than the machine. So there is a list of those that may be called, and
before each call its tensors, sizes and indices are looked through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import torch

from retrograd.bundles.call_arguments import CallArguments
from retrograd.bundles.call_checks import CHECKS
from retrograd.bundles.copies import TensorCopies
from retrograd.bundles.growth import count_bytes
from retrograd.errors import UnsafeBundleError
from retrograd.hooks.dispatch import check_sparse

LEAST_ROOM = 1 << 30
"""Bytes that every program may make."""

ROOM_FOR_EACH = 32
"""Bytes that a program may make for each byte that its bundle holds."""

_NEW_SPARSE = frozenset({"_sparse_coo_tensor_unsafe", "_sparse_coo_tensor_with_dims_and_tensors"})
"""They make a tensor that takes no more memory than its parts."""


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
    text = resources.files("retrograd.bundles").joinpath("operations.txt").read_text(encoding="utf-8")
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
