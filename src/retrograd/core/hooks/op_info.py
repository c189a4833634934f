"""Op info: what an operation writes to, whether it can be repeated, from which generator it draws, and at what price.

One table, by the names of torch's operations; autograd's nodes are called after them (``ReluBackward0``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from retrograd.core.hooks.dispatch import entry_of, is_operation, is_random

Price = Literal["free", "cheap", "dear"]


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """The work of recomputing a tensor.

    Attributes:
        action: what has to be run.
        sources: what it needs, in words.
        price: ``free`` moves no bytes, ``cheap`` reads and writes each element once or twice, ``dear`` is a product of
            matrices, a convolution or an attention.
    """

    action: str
    sources: str
    price: Price

    def __str__(self) -> str:
        return f"{self.action} of {self.sources}"


_VIEWS = (
    "alias", "as_strided", "diagonal", "expand", "lift", "permute", "_reshape_alias", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsafe_chunk", "unsafe_split",
    "unsafe_split_with_sizes", "_unsafe_view", "unsqueeze", "view", "view_as_complex", "view_as_real",
)  # fmt: skip
"""Operations that share the memory of what they are given, though the schema of some does not say so."""

_ELEMENTWISE = (
    "abs", "add", "addcdiv", "addcmul", "ceil", "clamp", "clamp_max", "clamp_min", "copysign", "cos", "cosh", "div",
    "elu", "erf", "exp", "expm1", "floor", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "lerp", "log",
    "log1p", "log2", "log_sigmoid_forward", "masked_fill", "maximum", "minimum", "mish", "mul", "neg", "pow",
    "reciprocal", "relu", "rsqrt", "rsub", "sigmoid", "silu", "sin", "sinh", "softplus", "sqrt", "sub", "tan", "tanh",
    "threshold", "tril", "triu", "where",
)  # fmt: skip

_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
"""Operations that write into running statistics without saying so, and do not read them while training."""

_NORMALISATIONS = {
    **dict.fromkeys(_BATCH_NORMS, "batch norm"),
    "native_layer_norm": "layer norm", "native_group_norm": "group norm", "_fused_rms_norm": "RMS norm",
}  # fmt: skip

_OTHERS: dict[str, tuple[str, str, Price]] = {
    "_softmax": ("softmax", "its input", "cheap"),
    "_safe_softmax": ("softmax", "its input", "cheap"),
    "_log_softmax": ("log-softmax", "its input", "cheap"),
    "native_dropout": ("dropout", "its input and the random state", "cheap"),
    "_fused_dropout": ("dropout", "its input and the random state", "cheap"),
    "bernoulli": ("bernoulli", "the random state", "cheap"),
    "_to_copy": ("cast", "the tensor in its other type", "cheap"),
    "clone": ("copy", "its input", "cheap"),
    "cat": ("concatenation", "its parts", "cheap"),
    "stack": ("concatenation", "its parts", "cheap"),
    "embedding": ("gather", "the table and the indices", "cheap"),
    "index": ("gather", "its input and the indices", "cheap"),
    "index_select": ("gather", "its input and the indices", "cheap"),
    "gather": ("gather", "its input and the indices", "cheap"),
    "constant_pad_nd": ("padding", "its input", "cheap"),
    "max_pool2d_with_indices": ("max pooling", "its input", "cheap"),
    "max_pool3d_with_indices": ("max pooling", "its input", "cheap"),
    "avg_pool2d": ("average pooling", "its input", "cheap"),
    "_adaptive_avg_pool2d": ("average pooling", "its input", "cheap"),
    "mean": ("mean", "its input", "cheap"),
    "sum": ("sum", "its input", "cheap"),
    "upsample_nearest2d": ("upsampling", "its input", "cheap"),
    "upsample_bilinear2d": ("upsampling", "its input", "cheap"),
    "addmm": ("matrix product", "its input and weight", "dear"),
    "mm": ("matrix product", "both factors", "dear"),
    "bmm": ("matrix product", "both factors", "dear"),
    "baddbmm": ("matrix product", "both factors", "dear"),
    "linear": ("matrix product", "its input and weight", "dear"),
    "mkldnn_linear": ("matrix product", "its input and weight", "dear"),
    "convolution": ("convolution", "its input and weight", "dear"),
    "convolution_overrideable": ("convolution", "its input and weight", "dear"),
    "_scaled_dot_product_flash_attention": ("attention", "query, key and value", "dear"),
    "_scaled_dot_product_flash_attention_for_cpu": ("attention", "query, key and value", "dear"),
    "_scaled_dot_product_efficient_attention": ("attention", "query, key and value", "dear"),
    "_scaled_dot_product_cudnn_attention": ("attention", "query, key and value", "dear"),
}


def shorten_name(operation: str) -> str:
    """The name of an operation as its users know it: ``native_layer_norm`` → ``layer_norm``, ``relu_`` → ``relu``."""
    return operation.removeprefix("native_").removeprefix("_").rstrip("_").removesuffix("_forward")


_COSTS: dict[str, RecomputeCost] = {
    **{name: RecomputeCost("view", "the tensor it looks at", "free") for name in _VIEWS},
    **{name: RecomputeCost(shorten_name(name), "its inputs", "cheap") for name in _ELEMENTWISE},
    **{name: RecomputeCost(words, "its input and weights", "cheap") for name, words in _NORMALISATIONS.items()},
    **{name: RecomputeCost(*words) for name, words in _OTHERS.items()},
}
"""An operation that is not in it can be run again all the same; but a node of its kind only as a part of its module."""

_UNREPEATABLE = frozenset({
    "set_", "resize_", "resize_as_", "bincount", "histc", "index_add", "index_add_", "index_copy", "index_copy_",
    "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put", "index_reduce", "index_reduce_", "put", "put_",
    "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "segment_reduce",
    "_cudnn_rnn", "miopen_rnn", "batch_norm_update_stats", "batch_norm_gather_stats",
    "batch_norm_gather_stats_with_counts", "cumsum", "cumsum_", "median",
})  # fmt: skip
"""Operations that take memory from elsewhere, that write or add up in an order that is not the same twice on every
device, or that write into a state without saying so."""


def _name_node(operation: str) -> str:
    """The kind of an operation's node, without ``Backward0``: ``native_layer_norm`` → ``NativeLayerNorm``."""
    return "".join(part.title() for part in operation.removesuffix("_forward").split("_"))


_COSTS_OF_NODES = {_name_node(operation): cost for operation, cost in _COSTS.items()}
_ENDING = re.compile(r"Backward\d*$")
_CAST = RecomputeCost("cast", "the parameter", "cheap")
_DROPOUT = RecomputeCost("dropout mask", "the random state", "cheap")


@cache
def find_cost(maker: str | None) -> RecomputeCost | None:
    """Find how the result of a node such as ``"ReluBackward0"`` is recomputed; None where only its module can.

    Bitwise the same comes only of running the same kernel on the same bytes: a formula that is equal on paper is not.
    """
    return None if maker is None else _COSTS_OF_NODES.get(_ENDING.sub("", maker))


def is_view(maker: str) -> bool:
    """Return whether a node of this kind gives a view of what it was given."""
    cost = find_cost(maker)
    return cost is not None and cost.price == "free"


def find_cost_of_saved(kind: str, maker: str | None, operation: str) -> RecomputeCost | None:
    """Find how a saved tensor is recomputed.

    Args:
        kind: what it is, as in the column ``kind`` of an inventory.
        maker: kind of the node that made it.
        operation: torch's function in which it was saved, as in ``"dropout"``.
    """
    if kind == "cast":
        return _CAST
    if kind != "intermediate":
        return None
    if maker is None:
        return _DROPOUT if operation in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout") else None
    return find_cost(maker)


@dataclass(frozen=True, slots=True)
class OpInfo:
    """A kind of operation, and what its schema says of it.

    Attributes:
        function: the operation.
        entry: carries it out.
        is_noted: it makes or fills memory, and would do the same again.
        tensors: places of the arguments that are tensors, or lists of them.
        written: places and names of the arguments that it writes to.
        is_random: it draws from a generator.
        has_running: it has running statistics, which it must not count again.
    """

    function: Any
    entry: Any
    is_noted: bool
    tensors: tuple[int, ...]
    written: tuple[tuple[int, str], ...]
    is_random: bool
    has_running: bool


def find_op_info(function: Any) -> OpInfo:
    """Read the schema of a kind of operation."""
    if not is_operation(function):
        return OpInfo(function, function, False, (), (), False, False)
    name, arguments = name_of_operation(function), function._schema.arguments
    written = [(place, argument) for place, argument in enumerate(arguments) if _is_written(argument)]
    is_noted = (
        function.namespace == "aten"
        and name not in _UNREPEATABLE
        and not _gives_view(function, name)
        and not any("List" in str(argument.type) for _, argument in written)
    )
    places = tuple((place, argument.name) for place, argument in written)
    tensors = tuple(place for place, argument in enumerate(arguments) if "Tensor" in str(argument.type))
    return OpInfo(function, entry_of(function), is_noted, tensors, places, is_random(function), name in _BATCH_NORMS)


def _is_written(value: Any) -> bool:
    return value.alias_info is not None and value.alias_info.is_write


def _gives_view(function: Any, name: str) -> bool:
    returns = function._schema.returns
    return name in _VIEWS or any(value.alias_info is not None and not _is_written(value) for value in returns)


def name_of_operation(function: Any) -> str:
    """The name of an operation without its namespace, as in ``"native_layer_norm"``."""
    return str(function._schema.name.partition("::")[2])


def find_written(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    given = (args[place] if place < len(args) else kwargs.get(name) for place, name in info.written)
    return [
        tensor
        for value in given
        for tensor in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(tensor, Tensor)
    ]


def read_random_state(device: torch.device) -> Tensor:
    """Read the state of a device's default generator; the device is not waited for."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.default_generator.get_state()


def write_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state of a device's default generator."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def can_be_read(device: torch.device) -> bool:
    """Return whether the device has a generator whose state can be read now."""
    return device.type == "cpu" or (device.type == "cuda" and not torch.cuda.is_current_stream_capturing())


@contextmanager
def draw_again(
    operation: Any, args: list[Any], kwargs: dict[str, Any], state: Tensor, device: torch.device
) -> Iterator[None]:
    """Have the operation draw from this state; the program's generators are afterwards as they were.

    It is given a generator of its own if it takes one; else other threads must not draw from the default one meanwhile.
    """
    place, name = _find_generator(operation)
    if name:
        generator = torch.Generator(device)
        generator.set_state(state)
        if place < len(args):
            args[place] = generator
        else:
            kwargs[name] = generator
        yield
        return
    now = read_random_state(device)
    write_random_state(device, state)
    try:
        yield
    finally:
        write_random_state(device, now)


@cache
def _find_generator(operation: Any) -> tuple[int, str]:
    """Place and name of the argument that is a generator; no name where there is none."""
    for place, argument in enumerate(operation._schema.arguments):
        if "Generator" in str(argument.type):
            return place, str(argument.name)
    return 0, ""
