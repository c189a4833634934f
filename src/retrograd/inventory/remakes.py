"""How a saved tensor could be recomputed, from what, and at what price: one table, by the kind of node that made it.

The kinds are torch's own names of nodes. An operation that is not in the table is run again only as part of its module.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

Price = Literal["free", "cheap", "dear"]


@dataclass(frozen=True, slots=True)
class Remake:
    """How a tensor is recomputed.

    Attributes:
        action: what has to be run.
        sources: what it needs, in words.
        price: ``free`` moves no bytes, ``cheap`` reads and writes each element once or twice, ``dear`` is a product of
            matrices, a convolution or an attention.
        is_random: the random state of the first time is needed too.
    """

    action: str
    sources: str
    price: Price
    is_random: bool = False

    def __str__(self) -> str:
        return f"{self.action} of {self.sources}"


_VIEWS = (
    "Alias", "AsStrided", "Diagonal", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split",
    "SplitWithSizes", "Squeeze", "T", "Transpose", "Unbind", "Unfold", "UnsafeSplit", "UnsafeView", "Unsqueeze",
    "View", "ViewAsComplex", "ViewAsReal",
)  # fmt: skip
"""They share the memory of what they are given."""

_ELEMENTWISE = (
    "Abs", "Add", "Addcdiv", "Addcmul", "Ceil", "Clamp", "ClampMax", "ClampMin", "Copysign", "Cos", "Cosh", "Div",
    "Elu", "Erf", "Exp", "Expm1", "Floor", "Gelu", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyRelu", "Lerp", "Log",
    "Log1P", "Log2", "LogSigmoid", "MaskedFill", "Maximum", "Minimum", "Mish", "Mul", "Neg", "Pow", "Reciprocal",
    "Relu", "Rsqrt", "Rsub", "Sigmoid", "Silu", "Sin", "Sinh", "Softplus", "Sqrt", "Sub", "Tan", "Tanh",
    "Threshold", "Tril", "Triu", "Where",
)  # fmt: skip

_NORMALISATIONS = {
    "NativeBatchNorm": "batch norm", "CudnnBatchNorm": "batch norm", "MiopenBatchNorm": "batch norm",
    "NativeLayerNorm": "layer norm", "NativeGroupNorm": "group norm", "FusedRmsNorm": "RMS norm",
}  # fmt: skip

_OTHERS = {
    "Softmax": Remake("softmax", "its input", "cheap"),
    "SafeSoftmax": Remake("softmax", "its input", "cheap"),
    "LogSoftmax": Remake("log-softmax", "its input", "cheap"),
    "NativeDropout": Remake("dropout", "its input and the random state", "cheap", is_random=True),
    "FusedDropout": Remake("dropout", "its input and the random state", "cheap", is_random=True),
    "Bernoulli": Remake("bernoulli", "the random state", "cheap", is_random=True),
    "ToCopy": Remake("cast", "the tensor in its other type", "cheap"),
    "Clone": Remake("copy", "its input", "cheap"),
    "Cat": Remake("concatenation", "its parts", "cheap"),
    "Stack": Remake("concatenation", "its parts", "cheap"),
    "Embedding": Remake("gather", "the table and the indices", "cheap"),
    "Index": Remake("gather", "its input and the indices", "cheap"),
    "IndexSelect": Remake("gather", "its input and the indices", "cheap"),
    "Gather": Remake("gather", "its input and the indices", "cheap"),
    "ConstantPadNd": Remake("padding", "its input", "cheap"),
    "MaxPool2DWithIndices": Remake("max pooling", "its input", "cheap"),
    "MaxPool3DWithIndices": Remake("max pooling", "its input", "cheap"),
    "AvgPool2D": Remake("average pooling", "its input", "cheap"),
    "AdaptiveAvgPool2D": Remake("average pooling", "its input", "cheap"),
    "Mean": Remake("mean", "its input", "cheap"),
    "Sum": Remake("sum", "its input", "cheap"),
    "UpsampleNearest2D": Remake("upsampling", "its input", "cheap"),
    "UpsampleBilinear2D": Remake("upsampling", "its input", "cheap"),
    "Addmm": Remake("matrix product", "its input and weight", "dear"),
    "Mm": Remake("matrix product", "both factors", "dear"),
    "Bmm": Remake("matrix product", "both factors", "dear"),
    "Baddbmm": Remake("matrix product", "both factors", "dear"),
    "Linear": Remake("matrix product", "its input and weight", "dear"),
    "MkldnnLinear": Remake("matrix product", "its input and weight", "dear"),
    "Convolution": Remake("convolution", "its input and weight", "dear"),
    "ConvolutionOverrideable": Remake("convolution", "its input and weight", "dear"),
    "ScaledDotProductFlashAttention": Remake("attention", "query, key and value", "dear"),
    "ScaledDotProductFlashAttentionForCpu": Remake("attention", "query, key and value", "dear"),
    "ScaledDotProductEfficientAttention": Remake("attention", "query, key and value", "dear"),
    "ScaledDotProductCudnnAttention": Remake("attention", "query, key and value", "dear"),
}

_TABLE: dict[str, Remake] = {
    **{name: Remake("view", "the tensor it looks at", "free") for name in _VIEWS},
    **{name: Remake(name.lower(), "what it was given", "cheap") for name in _ELEMENTWISE},
    **{name: Remake(words, "its input and weights", "cheap")
       for name, words in _NORMALISATIONS.items()},
    **_OTHERS,
}  # fmt: skip

_ENDING = re.compile(r"Backward\d*$")
_CAST = Remake("cast", "the parameter", "cheap")
_DROPOUT = Remake("dropout mask", "the random state", "cheap", is_random=True)


@functools.cache
def find_remake(maker: str | None) -> Remake | None:
    """Find how the result of a node such as ``"ReluBackward0"`` is recomputed; None where only its module can.

    Bitwise the same comes only of running the same kernel on the same bytes: a formula that is equal on paper is not.
    """
    return None if maker is None else _TABLE.get(_ENDING.sub("", maker))


def is_view(maker: str) -> bool:
    """Whether a node of this kind gives a view of what it was given."""
    remake = find_remake(maker)
    return remake is not None and remake.price == "free"


def choose_remake(kind: str, maker: str | None, operation: str) -> Remake | None:
    """Choose how a saved tensor is recomputed.

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
    return find_remake(maker)
