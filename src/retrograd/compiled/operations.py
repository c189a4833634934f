"""The operations of ours in graphs of torch.compile: how they are defined, found in a trace, and written into it.

What torch's dispatcher does with a call of them is right, and slow. Three files know shorter ways, by names of torch's
that are not public: ``dynamo.py``, ``aot.py`` and ``inductor.py``, each for one of the layers of its compiler. Where a
name is missing, the dispatcher does it.
"""

from __future__ import annotations

import operator
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.node import Node, has_side_effect
from torch.utils.checkpoint import CheckpointPolicy

from retrograd.core.hooks.engine import mode_that_traces

_TRACING = "torch.fx.experimental.proxy_tensor"
_WRITTEN = ("operations", "handles", "taps", "inputs", "rules", "inductor")
"""Files whose words are in graphs, or in what is made of them."""


def _read_version() -> int:
    """What these files contain, as a number, for names of operations: caches have older graphs."""
    value, spec = 0, __spec__
    assert spec is not None
    loader: Any = spec.loader
    for name in _WRITTEN:
        try:
            value = zlib.crc32(loader.get_data(str(Path(str(spec.origin)).with_name(f"{name}.py"))), value)
        except OSError:  # compiled files alone are installed
            continue
    return value


_VERSION = _read_version()
_WITHOUT_VALUES = (FakeTensor, FunctionalTensor)

_UNSAFE = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))
"""CUDA graphs are cut here: what is recorded in one would be seen once, when it is made."""

library = torch.library.Library("retrograd", "DEF")


def define(name: str, signature: str) -> Any:
    """Define an operation; returns it."""
    library.define(f"{name}_{_VERSION:08x}{signature}", tags=_UNSAFE)
    return getattr(torch.ops.retrograd, f"{name}_{_VERSION:08x}").default


def implement(operation: Any, run: Callable[..., Any], fake: Callable[..., Any] | None = None) -> None:
    """Define what an operation does.

    Args:
        operation: the operation.
        run: what it does where a graph runs; without ``fake`` what it is made of wherever a graph with it is traced.
        fake: what it returns where there are no values.
    """
    name = operation._schema.name
    key = "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd"
    library.impl(name.partition("::")[2], run, key)
    if fake is None:
        has_side_effect(operation)
    else:
        torch.library.register_fake(name, fake, lib=library)


UNKNOWN: Any = object()
"""What an operation returns is to be asked."""


@dataclass(frozen=True, slots=True)
class Form:
    """How an operation is written; see :func:`call_plainly`."""

    function: Callable[..., Any]
    numbers_calls: bool
    returns: torch.dtype | None
    handles: int | None
    others: int | None
    run_id: int | None


forms: dict[Any, Form] = {}
"""The operations that may be written as calls of functions."""


def call_plainly(
    operation: Any,
    function: Callable[..., Any],
    *,
    numbers_calls: bool = False,
    returns: torch.dtype | None = UNKNOWN,
    handles: int | None = None,
    others: int | None = None,
    run_id: int | None = None,
) -> None:
    """Have a compiler write a call of a function of ours for an operation, if it can be taught.

    Args:
        operation: the operation.
        function: with the same arguments.
        numbers_calls: it counts calls, so it must not be put before or behind others that do.
        returns: nothing (None), or one tensor of a single element on the CPU, of this dtype.
        handles: which argument is a list of handles.
        others: which argument is a list of the handles of all calls in the graph, which only a compiler knows.
        run_id: which argument is a run id. Nothing is called where that is ``NOBODY`` of the function's module.
    """
    has_side_effect(operation)
    forms[operation] = Form(function, numbers_calls, returns, handles, others, run_id)


# ---- the graph that is traced with its backward ---------------------------------------------------------------------


def proxy_mode() -> Any:
    """What traces the graph that this code is a part of; None if nothing does."""
    room: Any = sys.modules.get(_TRACING)  # not loaded by us: that takes long
    if room is None:
        return None
    return getattr(room, "get_proxy_mode", mode_that_traces)()  # torch's question knows of export above autograd too


def traced_nodes() -> Sequence[Node]:
    """The nodes of the graph that is traced."""
    mode = proxy_mode()
    return () if mode is None else mode.tracer.graph.nodes


def save_last_traced(operation: object) -> None:
    """What this operation of ours has given goes to the backward graph, and is not computed again in checkpoints."""
    node = next((node for node in reversed(traced_nodes()) if node.target is operation), None)
    if node is not None:
        results = [user for user in node.users if user.target is operator.getitem]  # where there are several
        for each in (node, *results):  # of a tuple both: results are taken for views of it, which may be made again
            each.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def count_traced(operation: object) -> int:
    """How often this operation is in the graph that is being traced."""
    return sum(node.target is operation for node in traced_nodes())


def is_rehearsed(tensors: Sequence[Tensor]) -> bool:
    """Return whether a compiler runs this for shapes alone: without values, and nothing is put into a graph."""
    return bool(tensors) and isinstance(tensors[0], _WITHOUT_VALUES) and proxy_mode() is None


def new_run_id(*_: object) -> Tensor:
    """A run id where a graph is traced. On the CPU, whatever is seen."""
    return torch.empty(1, dtype=torch.uint32, device="cpu")
