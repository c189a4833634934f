"""What recomputing a saved tensor takes, by the operation that made it.

One table, by the names of torch's operations; autograd's nodes are called after them (``ReluBackward0``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

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

_NORMALISATIONS = {
    "native_batch_norm": "batch norm", "cudnn_batch_norm": "batch norm", "miopen_batch_norm": "batch norm",
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


def _shorten_name(operation: str) -> str:
    """The name of an operation as its users know it: ``native_layer_norm`` → ``layer_norm``, ``relu_`` → ``relu``."""
    return operation.removeprefix("native_").removeprefix("_").rstrip("_").removesuffix("_forward")


_COSTS: dict[str, RecomputeCost] = {
    **{name: RecomputeCost("view", "the tensor it looks at", "free") for name in _VIEWS},
    **{name: RecomputeCost(_shorten_name(name), "its inputs", "cheap") for name in _ELEMENTWISE},
    **{name: RecomputeCost(words, "its input and weights", "cheap") for name, words in _NORMALISATIONS.items()},
    **{name: RecomputeCost(*words) for name, words in _OTHERS.items()},
}
"""A node of a kind that is not in it is computed again only as a part of its module."""


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
