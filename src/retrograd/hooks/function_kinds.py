"""What a torch function can do: asked of each that a program calls, so it is found out once."""

from __future__ import annotations

from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

from retrograd.hooks.function_names import name_function

_TO_ARRAYS = ("numpy", "__array__", "__dlpack__")

_CARRYING = frozenset(
    {"linear", "bilinear", "matmul", "rmatmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d",
     "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "embedding", "tanh", "sigmoid", "relu",
     "gelu", "silu", "elu", "selu", "leaky_relu", "hardtanh", "hardswish", "logsigmoid", "softplus", "mish", "relu6",
     "dropout", "feature_dropout", "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_avg_pool2d",
     "adaptive_max_pool2d", "view", "reshape", "flatten", "unflatten", "ravel", "transpose", "permute", "movedim",
     "contiguous", "squeeze", "unsqueeze", "expand", "expand_as", "repeat", "repeat_interleave", "getitem", "chunk",
     "split", "unbind", "select", "narrow", "index_select", "gather", "cat", "concat", "stack", "hstack", "vstack",
     "t", "T", "mT", "flip", "roll", "pad", "abs", "neg", "clone", "detach", "data", "sin", "cos", "relu_"}
)  # fmt: skip


IDLE = 0
"""Nothing of interest: it reads or sets an attribute, or registers something."""
MAKES = 1
"""It makes tensors."""
WRITES = 2
"""It may write to what it is given, or hand the memory to NumPy."""
CARRIES = 4
"""It makes what is not finite out of what is not, or by overflow, and in no other way."""
SMOOTH = 8
"""Its derivative is finite where it is finite itself, but for overflow."""

_SMOOTH = frozenset(
    {"add", "__add__", "radd", "sub", "__sub__", "rsub", "mul", "__mul__", "rmul", "__iadd__", "__isub__", "__imul__",
     "add_", "sub_", "mul_", "square", "exp", "sum", "mean", "max", "min", "amax", "amin", "maximum", "minimum",
     "where", "masked_fill", "masked_fill_", "clamp", "clamp_", "clip", "softmax", "log_softmax", "layer_norm",
     "batch_norm", "group_norm", "instance_norm", "scaled_dot_product_attention", "cross_entropy", "nll_loss",
     "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "avg_pool1d",
     "avg_pool2d", "adaptive_avg_pool1d", "tril", "triu", "einsum", "interpolate", "setitem", "cumsum", "sort", "topk"}
)  # fmt: skip


_MANY = 4096
_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_known: dict[Any, int] = {}


def kind_of(function: Any) -> int:
    """What this torch function can do."""
    try:
        return _known[function]
    except KeyError:
        if len(_known) > _MANY:
            _known.clear()
        kind = _known[function] = _find_kind(function)
        return kind
    except TypeError:  # somebody's own, that cannot be hashed
        return MAKES | WRITES


def _find_kind(function: Any) -> int:
    name, plain = name_function(function), str(getattr(function, "__name__", ""))
    kind = MAKES if name else IDLE
    if plain not in ("__get__", "__set__", "__delete__") and _may_write(function, plain):
        kind |= WRITES
    if name in _CARRYING:
        kind |= CARRIES
    return kind | SMOOTH if name in _CARRYING or name in _SMOOTH else kind


def _may_write(function: Any, name: str) -> bool:
    """Of torch's own functions, those in place are known by their names; one in Python may call any."""
    if not isinstance(function, _BUILT_IN):
        return True
    is_operator = name.startswith("__") and name.endswith("__")
    if is_operator:
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE) or name in _TO_ARRAYS
    return name.endswith("_") or name in _TO_ARRAYS or name in _WRITING


_NOT_IN_PLACE = ("__int__", "__index__", "__invert__", "__iter__")

_WRITING = frozenset(
    {"batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "instance_norm", "rrelu",
     "fake_quantize_per_channel_affine", "fused_moving_avg_obs_fake_quant"}
)  # fmt: skip
"""Those that write to what they are given, though their names do not say so."""
