"""Checks that torch leaves out before it computes: sizes and indices of the formulas that autograd alone calls.

Their kernels trust autograd to hand them what the forward gave. A program that somebody else wrote need not: with
another size or index they read and write past the ends of tensors. Each check here takes the arguments by the names
in torch's schema, and raises a ``ValueError`` for what a forward cannot have given.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from retrograd.core.hooks.dispatch import check_sparse_parts
from retrograd.following.bundles.call_arguments import CallArguments, Check, require
from retrograd.following.bundles.window_checks import WINDOW_CHECKS


def _check_distances(given: CallArguments) -> None:
    one, other = given["x1"], given["x2"]
    require(min(one.dim(), other.dim()) >= 2 and one.shape[-1] == other.shape[-1], "the points have other dimensions")
    leading = torch.broadcast_shapes(one.shape[:-2], other.shape[:-2])
    for name in ("grad", "cdist"):
        given.expect_shape(name, (*leading, one.shape[-2], other.shape[-2]))


def _check_pair_distances(given: CallArguments) -> None:
    require(given["self"].dim() == 2 and given["self"].numel(), "the points are not a matrix")
    count = len(given["self"])
    for name in ("grad", "pdist"):
        given.expect_shape(name, (count * (count - 1) // 2,))


def _lengths(given: CallArguments, name: str) -> list[int]:
    value = given[name]
    return [int(each) for each in (value.tolist() if isinstance(value, Tensor) else value)]


def _check_alignment(given: CallArguments) -> None:
    """CTC: [steps, samples, classes] against targets of given lengths."""
    scores, targets = given["log_probs"], given["targets"]
    require(scores.dim() == 3, "log_probs has no three dimensions")
    steps, samples, classes = scores.shape
    inputs, lengths = _lengths(given, "input_lengths"), _lengths(given, "target_lengths")
    require(len(inputs) == len(lengths) == samples, "the lengths are not those of the samples")
    require(all(0 <= each <= steps for each in inputs), "an input length is out of range")
    require(all(each >= 0 for each in lengths), "a target length is negative")
    room = targets.shape[-1] if targets.dim() == 2 else targets.numel()
    needed = max(lengths, default=0) if targets.dim() == 2 else sum(lengths)
    require(targets.dim() in {1, 2} and needed <= room, "the targets are shorter than their lengths")
    require(targets.dim() == 1 or len(targets) == samples, "the targets are not those of the samples")
    require(0 <= given["blank"] < classes, "blank is not a class")
    given.expect_indices("targets", classes)


def _check_alignment_gradient(given: CallArguments) -> None:
    _check_alignment(given)
    steps, samples, _ = given["log_probs"].shape
    longest = max(_lengths(given, "target_lengths"), default=0)
    for name in ("grad", "neg_log_likelihood"):
        given.expect_length(name, samples)
    alpha = given["log_alpha"]
    require(alpha.dim() == 3 and tuple(alpha.shape[:2]) == (samples, steps), "log_alpha has another shape")
    require(alpha.shape[2] >= 2 * longest + 1, "log_alpha is too small for the targets")


def _check_offsets(given: CallArguments, rows: int) -> None:
    """Embedding bags: rows of a table, and where each bag of them begins."""
    indices, offsets = given["indices"], given["offsets"]
    require(indices.dim() == offsets.dim() == 1, "the numbers of dimensions are wrong")
    given.expect_indices("indices", rows)
    given.expect_indices("offsets", len(indices) + 1)
    require(not len(indices) or (len(offsets) and int(offsets[0]) == 0), "the first bag does not begin at 0")
    require(not len(offsets) or bool((offsets.diff() >= 0).all()), "the offsets do not rise")


def _check_bags(given: CallArguments, rows: int) -> None:
    _check_offsets(given, rows)
    gradient, indices, offsets = given["grad"], given["indices"], given["offsets"]
    require(gradient.dim() == 2, "the gradient is not a matrix")
    require(int((offsets < len(indices)).sum()) <= len(gradient), "there are more bags than gradients")
    if given["offset2bag"].numel():
        given.expect_length("offset2bag", len(indices))
        given.expect_indices("offset2bag", len(gradient))


def _check_bag_gradient(given: CallArguments) -> None:
    _check_bags(given, given["num_weights"])
    gradient, weights = given["grad"], given["per_sample_weights"]
    require(weights is None or weights.shape == given["indices"].shape, "per_sample_weights has another shape")
    if given["mode"] != 0:
        require(given["bag_size"].numel() >= len(gradient), "bag_size is too short")
    if given["mode"] == 2:
        given.expect_shape("maximum_indices", gradient.shape)
        given.expect_indices("maximum_indices", given["num_weights"], -1)


def _check_bag_weights(given: CallArguments) -> None:
    require(given["weight"].dim() == 2 and given["weight"].shape[1:] == given["grad"].shape[1:], "the widths differ")
    _check_bags(given, len(given["weight"]))


def _check_embedding(given: CallArguments) -> None:
    gradient, indices = given["grad_output"], given["indices"]
    require(gradient.dim() == indices.dim() + 1, "the numbers of dimensions are wrong")
    given.expect_shape("indices", gradient.shape[:-1])
    given.expect_indices("indices", given["num_weights"])


def _check_fourier(given: CallArguments) -> None:
    dims, count = list(given["dim"]), given["self"].dim()
    require(all(0 <= dim < count for dim in dims) and len(set(dims)) == len(dims), f"{dims} are not dimensions of it")
    require(given["normalization"] in {0, 1, 2}, "there is no such normalization")


def _check_heads(given: CallArguments) -> None:
    """Attention on a CPU: [batch, heads, places, width]."""
    query, key, value = given["query"], given["key"], given["value"]
    require(query.dim() == key.dim() == value.dim() == 4, "the numbers of dimensions are wrong")
    require(query.numel() and key.numel(), "there is nothing to attend to")
    require(len({query.dtype, key.dtype, value.dtype}) == 1, "the dtypes differ")
    batch, heads, places, width = query.shape
    require(key.shape == (batch, heads, key.shape[2], width), "the key does not fit the query")
    require(value.shape == key.shape, "the value does not fit the key")
    mask = given["attn_mask"]
    if mask is not None:
        wanted = (batch, heads, places, key.shape[2])
        require(mask.dim() in {2, 4}, "the mask has neither two nor four dimensions")
        fits = all(one in {1, other} for one, other in zip(mask.shape, wanted[-mask.dim() :], strict=True))
        require(fits, f"the mask has the shape {tuple(mask.shape)}, which does not fit {wanted}")


def _check_heads_gradient(given: CallArguments) -> None:
    _check_heads(given)
    query = given["query"]
    for name in ("grad_out", "out"):
        require(given[name].dtype is query.dtype, "the dtypes differ")
        given.expect_shape(name, query.shape)
    given.expect_shape("logsumexp", query.shape[:3])
    is_wide = given["logsumexp"].dtype is (torch.float64 if query.dtype is torch.float64 else torch.float32)
    require(is_wide, "logsumexp is of another dtype")


def _check_segments(given: CallArguments) -> None:
    data, axis, lengths, offsets = given["data"], given["axis"], given["lengths"], given["offsets"]
    require((lengths is None) != (offsets is None), "it needs either lengths or offsets")
    bounds = offsets if lengths is None else lengths
    require(bounds.dim() >= 1 and bounds.dtype in {torch.int64, torch.int32}, "the segments are not integers")
    require(axis == bounds.dim() - 1 and 0 <= axis < data.dim(), "the axis is another")
    require(bounds.shape[:-1] == data.shape[:axis], "the segments are not those of the data")
    if lengths is None:
        given.expect_indices("offsets", data.shape[axis] + 1)
        require((bounds.diff() >= 0).all(), "the offsets do not rise")
    else:
        given.expect_indices("lengths", data.shape[axis] + 1)
        require((bounds.sum(-1) <= data.shape[axis]).all(), "the segments are longer than the data")
    if "grad" in given:
        count = bounds.shape[-1] - (1 if lengths is None else 0)
        for name in ("grad", "output"):
            require(given[name].dtype is data.dtype, "the dtypes differ")
            given.expect_shape(name, (*data.shape[:axis], count, *data.shape[axis + 1 :]))


def _check_sparse_product(given: CallArguments) -> None:
    matrix, gradient, weight = given["self"], given["grad_out"], given["weight"]
    require(matrix.layout is torch.sparse_csr and weight.dim() == 2, "it is not a product of a sparse matrix")
    require(matrix.shape[1] == len(weight), "the matrices do not fit")
    given.expect_shape("grad_out", (len(matrix), weight.shape[1]))
    require(gradient.dtype is weight.dtype is matrix.dtype, "the dtypes differ")
    if given["reduce"] in {"amax", "amin"}:
        given.expect_shape("arg_out", gradient.shape)
        given.expect_indices("arg_out", matrix.values().shape[-1] + 1)


def _check_channels(given: CallArguments, used: Sequence[str], unused: Sequence[str]) -> None:
    """A batch norm: vectors with an element for each channel."""
    source = given["input"]
    require(source.dim() >= 2 and source.shape[1], "there are no channels")
    for name in used:
        given.expect_length(name, source.shape[1])
    for name in unused:
        given.expect_length(name, source.shape[1], needed=False, used=False)
    for name in ("weight", "bias"):
        if name in given:
            given.expect_length(name, source.shape[1], needed=False)


def _check_batch_norm(given: CallArguments) -> None:
    statistics = [name for name in ("running_mean", "running_var") if given.get(name) is not None]
    is_trained = given.get("training", True)
    require(is_trained or len(statistics) == 2, "nothing has been measured that it could use")
    require(not is_trained or given["input"].numel(), "there is nothing to measure")
    _check_channels(given, statistics, [])


def _check_batch_norm_gradient(given: CallArguments) -> None:
    given.expect_same_shapes("input", "grad_out")
    inverse = "save_invstd" if "save_invstd" in given else "save_var"
    is_trained = given["train"] if "train" in given else given["update"]
    measured, saved = ["running_mean", "running_var"], ["save_mean", inverse]
    _check_channels(given, saved if is_trained else measured, measured if is_trained else saved)


def _check_layer_norm(given: CallArguments) -> None:
    source, inner = given["input"], list(given["normalized_shape"])
    require(inner and list(source.shape[-len(inner) :]) == inner, "normalized_shape is not that of the input")
    given.expect_shape("grad_out", source.shape)
    for name in ("mean", "rstd"):
        given.expect_length(name, prod(source.shape[: -len(inner)]))
    for name in ("weight", "bias"):
        if given[name] is not None:
            given.expect_shape(name, inner)


def _check_group_norm(given: CallArguments) -> None:
    samples, channels, places, groups = (given[name] for name in ("N", "C", "HxW", "group"))
    source = given["input"]
    require(min(samples, channels, places) >= 0 and groups > 0 and channels % groups == 0, "the sizes make no sense")
    require(source.dim() >= 2 and tuple(source.shape[:2]) == (samples, channels), "N or C is another")
    require(source.numel() == samples * channels * places, "HxW is another")
    given.expect_shape("grad_out", source.shape)
    for name in ("mean", "rstd"):
        given.expect_length(name, samples * groups)
    given.expect_length("weight", channels, needed=False)


def _check_lstm(given: CallArguments, weights: Sequence[str], cell: str) -> None:
    """An LSTM's layer by oneDNN: [steps, samples, width]."""
    source, hidden = given["input"], given["hidden_size"]
    require(given["mode"] == 2 and hidden > 0 and source.dim() == 3, "it is not a layer of an LSTM")
    require(given["has_biases"] and not given["bidirectional"], "it is a layer of another kind")
    require(not given["batch_sizes"], "its samples are packed")
    first, second, *biases = weights
    given.expect_shape(first, (4 * hidden, source.shape[2]))
    given.expect_shape(second, (4 * hidden, hidden))
    for name in biases:
        given.expect_shape(name, (4 * hidden,))
    for name in ("hx_", cell):
        given.expect_length(name, source.shape[1] * hidden)


def _check_lstm_gradient(given: CallArguments) -> None:
    """The workspace is as large as the forward makes it for such sizes."""
    weights, source = ("weight1", "weight2", "weight3", "weight4"), given["input"]
    _check_lstm(given, weights, "cx_tmp")
    steps, samples, hidden = source.shape[0], source.shape[1], given["hidden_size"]
    require(given["train"], "it did not train")
    for name in ("output", "grad_output"):
        if given[name] is not None:
            given.expect_shape(name, (steps, samples, hidden))
    for name in ("hy_", "cy_", "grad_hy", "grad_cy"):
        if given[name] is not None:
            given.expect_length(name, samples * hidden)
    tensors = [each for each in given.values() if isinstance(each, Tensor) and each is not given["workspace"]]
    require(len({each.dtype for each in tensors}) == 1, "the dtypes differ")
    blank = [torch.zeros_like(given[name]) for name in ("input", *weights, "hx_", "cx_tmp")]
    facts = [given[name] for name in ("reverse", "batch_sizes", "mode", "hidden_size", "num_layers")]
    forward = torch.ops.aten.mkldnn_rnn_layer.default
    with torch.enable_grad():  # else it makes none
        made = forward(*blank, *facts, True, False, given["batch_first"], True)[3]
    require(given["workspace"].dtype is made.dtype, "the workspace is of another dtype")
    given.expect_shape("workspace", made.shape)


def _check_classes(given: CallArguments, spatial: int = 0) -> None:
    """A loss over classes: [samples, classes, …], [classes] or a single one, and a class for each."""
    self = given["self"]
    require(self.dim() == spatial + 2 or (self.dim() < 2 and not spatial), "the number of dimensions is wrong")
    shape = self.shape if self.dim() > 1 else (1, self.numel())
    classes, places = shape[1], [shape[0], *shape[2:]]
    given.expect_length("target", prod(places))
    require(self.dim() < 2 or list(given["target"].shape) == places, "the target has another shape")
    given.expect_indices("target", classes, *([given["ignore_index"]] if "ignore_index" in given else []))
    given.expect_length("weight", classes, needed=False)
    if "grad_output" in given:
        is_each = given["reduction"] == 0 and self.dim() > 1
        given.expect_length("grad_output", prod(places) if is_each else 1)
    if "total_weight" in given:
        given.expect_length("total_weight", 1)


def _check_labels(given: CallArguments) -> None:
    given.expect_same_shapes("self", "target", "is_target")
    require(given["self"].dim() <= 2, "the number of dimensions is wrong")
    given.expect_indices("target", given["self"].shape[-1] if given["self"].dim() else 1, -1)
    is_each = given["reduction"] == 0 and given["self"].dim() == 2
    given.expect_length("grad_output", len(given["self"]) if is_each else 1)


def _check_pivots(matrix: str, given: CallArguments) -> None:
    lu, pivots = given[matrix], given[{"LU": "pivots", "LU_data": "LU_pivots"}[matrix]]
    require(lu.dim() >= 2 and pivots.dtype is torch.int32, "it is not a factorization")
    count = min(lu.shape[-2:])
    require(tuple(pivots.shape) == (*lu.shape[:-2], count), "the pivots are not those of the matrix")
    require(((pivots >= 1) & (pivots <= lu.shape[-2])).all(), "a pivot is out of range")


def _check_sparse_parts(given: CallArguments) -> None:
    check_sparse_parts(given["indices"], given["values"], given["size"], given["is_coalesced"])


def _check_whole_division(given: CallArguments) -> None:
    """Refuse to divide the least integer by -1: the processor ends a process that asks for it."""
    one, other = given["self"], given["other"]
    dtypes = [each.dtype for each in (one, other) if isinstance(each, Tensor)]
    if given.get("rounding_mode") != "trunc" or any(each.is_floating_point or each.is_complex for each in dtypes):
        return
    is_least = isinstance(one, Tensor) and one.dtype is not torch.bool and (one == torch.iinfo(one.dtype).min).any()
    has_minus_one = (other == -1).any() if isinstance(other, Tensor) else other == -1
    require(not (is_least and has_minus_one), "the least integer cannot be divided by -1")


def _check_repeats(given: CallArguments) -> None:
    require((given["repeats"] >= 0).all(), "a number of repeats is negative")
    total = int(given["repeats"].sum(dtype=torch.float64))
    require(given["output_size"] in {None, total} and total < 1 << 27, f"{total} repeats")


_BIASED = ("weight0", "weight1", "weight2", "weight3")

CHECKS: dict[str, Check] = WINDOW_CHECKS | {
    "_batch_norm_with_update": _check_batch_norm,
    "_cdist_backward": _check_distances,
    "_ctc_loss": _check_alignment,
    "_ctc_loss_backward": _check_alignment_gradient,
    "_embedding_bag": lambda given: _check_offsets(given, len(given["weight"])),
    "_embedding_bag_backward": _check_bag_gradient,
    "_embedding_bag_per_sample_weights_backward": _check_bag_weights,
    "_fft_c2c": _check_fourier,
    "_fft_c2r": _check_fourier,
    "_fft_r2c": _check_fourier,
    "_log_softmax_backward_data": lambda given: given.expect_same_shapes("output", "grad_output"),
    "_native_batch_norm_legit": _check_batch_norm,
    "_pdist_backward": _check_pair_distances,
    "_scaled_dot_product_flash_attention_for_cpu": _check_heads,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _check_heads_gradient,
    "_segment_reduce_backward": _check_segments,
    "_sparse_coo_tensor_unsafe": _check_sparse_parts,
    "_sparse_coo_tensor_with_dims_and_tensors": _check_sparse_parts,
    "_sparse_mm_reduce_impl_backward": _check_sparse_product,
    "batch_norm_backward": _check_batch_norm_gradient,
    "div": _check_whole_division,
    "div_": _check_whole_division,
    "embedding_dense_backward": _check_embedding,
    "linalg_lu_solve": partial(_check_pivots, "LU"),
    "lu_unpack": partial(_check_pivots, "LU_data"),
    "mkldnn_rnn_layer": partial(_check_lstm, weights=_BIASED, cell="cx_"),
    "mkldnn_rnn_layer_backward": _check_lstm_gradient,
    "multi_margin_loss_backward": _check_classes,
    "multilabel_margin_loss_backward": _check_labels,
    "native_batch_norm": _check_batch_norm,
    "native_batch_norm_backward": _check_batch_norm_gradient,
    "native_group_norm_backward": _check_group_norm,
    "native_layer_norm_backward": _check_layer_norm,
    "nll_loss2d_backward": partial(_check_classes, spatial=2),
    "nll_loss_backward": _check_classes,
    "repeat_interleave": _check_repeats,
    "segment_reduce": _check_segments,
}
"""Operation, without its overload → the check of its arguments."""
