"""What torch does not check before it computes: sizes and indices of the formulas that autograd alone calls.

Their kernels trust autograd to hand them what the forward gave. A program that somebody else wrote need not: with
another size or index they read and write past the ends of tensors. Each check here takes the arguments by the names
in torch's schema, and raises a ``ValueError`` for what a forward cannot have given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from retrograd.hooks.dispatch import check_sparse_parts

Arguments = Mapping[str, Any]
Check = Callable[[Arguments], None]


def require(condition: object, what: str) -> None:
    """Raise a ``ValueError`` where a condition is not met."""
    if not condition:
        raise ValueError(what)


def same_shapes(given: Arguments, *names: str) -> None:
    """These arguments have one shape and one dtype."""
    first = given[names[0]]
    for name in names[1:]:
        _expect_shape(given, name, first.shape)


def in_range(given: Arguments, name: str, end: int, *also: int) -> None:
    """All elements of an argument are indices from 0 to before the end, or one of a few other numbers."""
    indices = given[name]
    if not indices.numel():
        return
    require(indices.dtype in {torch.int64, torch.int32}, f"{name} is of {indices.dtype}")
    is_right = (indices >= 0) & (indices < end)
    for number in also:
        is_right |= indices == number
    require(is_right.all(), f"an index in {name} is outside of 0 to {end - 1}")


def _expect_shape(given: Arguments, name: str, shape: Sequence[int]) -> None:
    found = tuple(given[name].shape)
    require(found == tuple(shape), f"{name} has the shape {found}, not {tuple(shape)}")


def _expect_length(given: Arguments, name: str, length: int, *, needed: bool = True, used: bool = True) -> None:
    """It has that many elements; where it is not needed it may be None, and where it is not used, empty."""
    tensor = given[name]
    if tensor is None:
        require(not needed, f"{name} is missing")
        return
    is_right = tensor.numel() == length or not (used or tensor.numel())
    require(is_right, f"{name} has {tensor.numel()} elements, not {length}")


def _fill(values: Sequence[int], length: int) -> list[int]:
    """One number for each dimension; a single one stands for all."""
    return list(values) * length if len(values) == 1 else list(values)


def _count_windows(spatial: int, given: Arguments) -> tuple[int, ...]:
    """How many windows a pooling has along each dimension."""
    kernel = _fill(given["kernel_size"], spatial)
    stride, padding = _fill(given["stride"] or kernel, spatial), _fill(given["padding"], spatial)
    dilation = _fill(given.get("dilation", (1,)), spatial)
    lengths = given["self"].shape[-spatial:]
    require({len(kernel), len(stride), len(padding), len(dilation)} == {spatial}, "the windows have other dimensions")
    require(min(*kernel, *stride, *dilation) > 0 and min(padding) >= 0, "there are no such windows")
    return tuple(
        _count_along(*each, is_up=given["ceil_mode"])
        for each in zip(lengths, kernel, stride, padding, dilation, strict=True)
    )


def _count_along(length: int, kernel: int, stride: int, padding: int, dilation: int, *, is_up: bool) -> int:
    require(2 * padding <= kernel, "there is more padding than half of a window")
    room = length + 2 * padding - dilation * (kernel - 1) - 1
    require(room >= 0, "a window is larger than the input")
    count = (room + (stride - 1 if is_up else 0)) // stride + 1
    return count - 1 if is_up and (count - 1) * stride >= length + padding else count


def _check_pool(spatial: int, given: Arguments) -> None:
    """The gradient has the samples and channels of the source."""
    gradient, self = given["grad_output"], given["self"]
    require(
        gradient.dim() == self.dim() and self.dim() in {spatial + 1, spatial + 2}, "the numbers of dimensions differ"
    )
    require(gradient.shape[:-spatial] == self.shape[:-spatial], "samples or channels differ")
    require(prod(self.shape[-spatial:]) and prod(gradient.shape[-spatial:]), "there is nothing to pool")


def _check_max_pool(spatial: int, given: Arguments) -> None:
    _check_pool(spatial, given)
    _expect_shape(given, "indices", given["grad_output"].shape)
    in_range(given, "indices", prod(given["self"].shape[-spatial:]))


def _check_average_pool(spatial: int, given: Arguments) -> None:
    _check_pool(spatial, given)
    windows = _count_windows(spatial, given)
    require(tuple(given["grad_output"].shape[-spatial:]) == windows, f"there are {windows} windows")
    require(given["divisor_override"] != 0, "divisor_override is 0")


def _check_window_pool(spatial: int, given: Arguments) -> None:
    _check_max_pool(spatial, given)
    windows = _count_windows(spatial, given)
    require(tuple(given["grad_output"].shape[-spatial:]) == windows, f"there are {windows} windows")


def _check_padding(spatial: int, kind: str, given: Arguments) -> None:
    self, padding = given["self"], list(given["padding"])
    require(self.dim() in {spatial + 1, spatial + 2} and len(padding) == 2 * spatial, "the dimensions do not fit")
    shape = list(self.shape)
    for index in range(spatial):
        before, after = padding[2 * index : 2 * index + 2]
        is_near = kind == "replication" or max(before, after) < shape[-1 - index]
        require(is_near, "there is more padding than there is to reflect")
        require(shape[-1 - index] > 0 and shape[-1 - index] + before + after > 0, "nothing is left")
        shape[-1 - index] += before + after
    _expect_shape(given, "grad_output", shape)


def _check_fractional_pool(spatial: int, given: Arguments) -> None:
    require(tuple(given["grad_output"].shape[-spatial:]) == tuple(given["output_size"]), "output_size is another")
    _check_max_pool(spatial, given)


def _check_distances(given: Arguments) -> None:
    one, other = given["x1"], given["x2"]
    require(min(one.dim(), other.dim()) >= 2 and one.shape[-1] == other.shape[-1], "the points have other dimensions")
    leading = torch.broadcast_shapes(one.shape[:-2], other.shape[:-2])
    for name in ("grad", "cdist"):
        _expect_shape(given, name, (*leading, one.shape[-2], other.shape[-2]))


def _check_pair_distances(given: Arguments) -> None:
    require(given["self"].dim() == 2 and given["self"].numel(), "the points are no matrix")
    count = len(given["self"])
    for name in ("grad", "pdist"):
        _expect_shape(given, name, (count * (count - 1) // 2,))


def _lengths(given: Arguments, name: str) -> list[int]:
    value = given[name]
    return [int(each) for each in (value.tolist() if isinstance(value, Tensor) else value)]


def _check_alignment(given: Arguments) -> None:
    """CTC: [steps, samples, classes] against targets of given lengths."""
    scores, targets = given["log_probs"], given["targets"]
    require(scores.dim() == 3, "log_probs has no three dimensions")
    steps, samples, classes = scores.shape
    inputs, lengths = _lengths(given, "input_lengths"), _lengths(given, "target_lengths")
    require(len(inputs) == len(lengths) == samples, "the lengths are not those of the samples")
    require(all(0 <= each <= steps for each in inputs), "an source length is out of range")
    require(all(each >= 0 for each in lengths), "a target length is negative")
    room = targets.shape[-1] if targets.dim() == 2 else targets.numel()
    needed = max(lengths, default=0) if targets.dim() == 2 else sum(lengths)
    require(targets.dim() in {1, 2} and needed <= room, "the targets are shorter than their lengths")
    require(targets.dim() == 1 or len(targets) == samples, "the targets are not those of the samples")
    require(0 <= given["blank"] < classes, "blank is not a class")
    in_range(given, "targets", classes)


def _check_alignment_gradient(given: Arguments) -> None:
    _check_alignment(given)
    steps, samples, _ = given["log_probs"].shape
    longest = max(_lengths(given, "target_lengths"), default=0)
    for name in ("grad", "neg_log_likelihood"):
        _expect_length(given, name, samples)
    alpha = given["log_alpha"]
    require(alpha.dim() == 3 and tuple(alpha.shape[:2]) == (samples, steps), "log_alpha has another shape")
    require(alpha.shape[2] >= 2 * longest + 1, "log_alpha is too small for the targets")


def _check_offsets(given: Arguments, rows: int) -> None:
    """Embedding bags: rows of a table, and where each bag of them begins."""
    indices, offsets = given["indices"], given["offsets"]
    require(indices.dim() == offsets.dim() == 1, "the numbers of dimensions are wrong")
    in_range(given, "indices", rows)
    in_range(given, "offsets", len(indices) + 1)
    require(not len(indices) or (len(offsets) and int(offsets[0]) == 0), "the first bag does not begin at 0")
    require(not len(offsets) or bool((offsets.diff() >= 0).all()), "the offsets do not rise")


def _check_bags(given: Arguments, rows: int) -> None:
    _check_offsets(given, rows)
    gradient, indices, offsets = given["grad"], given["indices"], given["offsets"]
    require(gradient.dim() == 2, "the gradient is not a matrix")
    require(int((offsets < len(indices)).sum()) <= len(gradient), "there are more bags than gradients")
    if given["offset2bag"].numel():
        _expect_length(given, "offset2bag", len(indices))
        in_range(given, "offset2bag", len(gradient))


def _check_bag_gradient(given: Arguments) -> None:
    _check_bags(given, given["num_weights"])
    gradient, weights = given["grad"], given["per_sample_weights"]
    require(weights is None or weights.shape == given["indices"].shape, "per_sample_weights has another shape")
    if given["mode"] != 0:
        require(given["bag_size"].numel() >= len(gradient), "bag_size is too short")
    if given["mode"] == 2:
        _expect_shape(given, "maximum_indices", gradient.shape)
        in_range(given, "maximum_indices", given["num_weights"], -1)


def _check_bag_weights(given: Arguments) -> None:
    require(given["weight"].dim() == 2 and given["weight"].shape[1:] == given["grad"].shape[1:], "the widths differ")
    _check_bags(given, len(given["weight"]))


def _check_embedding(given: Arguments) -> None:
    gradient, indices = given["grad_output"], given["indices"]
    require(gradient.dim() == indices.dim() + 1, "the numbers of dimensions are wrong")
    _expect_shape(given, "indices", gradient.shape[:-1])
    in_range(given, "indices", given["num_weights"])


def _check_fourier(given: Arguments) -> None:
    dims, count = list(given["dim"]), given["self"].dim()
    require(all(0 <= dim < count for dim in dims) and len(set(dims)) == len(dims), f"{dims} are no dimensions of it")
    require(given["normalization"] in {0, 1, 2}, "there is no such normalization")


def _check_heads(given: Arguments) -> None:
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


def _check_heads_gradient(given: Arguments) -> None:
    _check_heads(given)
    query = given["query"]
    for name in ("grad_out", "out"):
        require(given[name].dtype is query.dtype, "the dtypes differ")
        _expect_shape(given, name, query.shape)
    _expect_shape(given, "logsumexp", query.shape[:3])
    is_wide = given["logsumexp"].dtype is (torch.float64 if query.dtype is torch.float64 else torch.float32)
    require(is_wide, "logsumexp is of another dtype")


def _check_segments(given: Arguments) -> None:
    data, axis, lengths, offsets = given["data"], given["axis"], given["lengths"], given["offsets"]
    require((lengths is None) != (offsets is None), "it needs either lengths or offsets")
    bounds = offsets if lengths is None else lengths
    require(bounds.dim() >= 1 and bounds.dtype in {torch.int64, torch.int32}, "the segments are no integers")
    require(axis == bounds.dim() - 1 and 0 <= axis < data.dim(), "the axis is another")
    require(bounds.shape[:-1] == data.shape[:axis], "the segments are not those of the data")
    if lengths is None:
        in_range(given, "offsets", data.shape[axis] + 1)
        require((bounds.diff() >= 0).all(), "the offsets do not rise")
    else:
        in_range(given, "lengths", data.shape[axis] + 1)
        require((bounds.sum(-1) <= data.shape[axis]).all(), "the segments are longer than the data")
    if "grad" in given:
        count = bounds.shape[-1] - (1 if lengths is None else 0)
        for name in ("grad", "output"):
            require(given[name].dtype is data.dtype, "the dtypes differ")
            _expect_shape(given, name, (*data.shape[:axis], count, *data.shape[axis + 1 :]))


def _check_sparse_product(given: Arguments) -> None:
    matrix, gradient, weight = given["self"], given["grad_out"], given["weight"]
    require(matrix.layout is torch.sparse_csr and weight.dim() == 2, "it is not a product of a sparse matrix")
    require(matrix.shape[1] == len(weight), "the matrices do not fit")
    _expect_shape(given, "grad_out", (len(matrix), weight.shape[1]))
    require(gradient.dtype is weight.dtype is matrix.dtype, "the dtypes differ")
    if given["reduce"] in {"amax", "amin"}:
        _expect_shape(given, "arg_out", gradient.shape)
        in_range(given, "arg_out", matrix.values().shape[-1] + 1)


def _check_channels(given: Arguments, used: Sequence[str], unused: Sequence[str]) -> None:
    """A batch norm: vectors with an element for each channel."""
    source = given["input"]
    require(source.dim() >= 2 and source.shape[1], "there are no channels")
    for name in used:
        _expect_length(given, name, source.shape[1])
    for name in unused:
        _expect_length(given, name, source.shape[1], needed=False, used=False)
    for name in ("weight", "bias"):
        if name in given:
            _expect_length(given, name, source.shape[1], needed=False)


def _check_batch_norm(given: Arguments) -> None:
    statistics = [name for name in ("running_mean", "running_var") if given.get(name) is not None]
    is_trained = given.get("training", True)
    require(is_trained or len(statistics) == 2, "nothing has been measured that it could use")
    require(not is_trained or given["input"].numel(), "there is nothing to measure")
    _check_channels(given, statistics, [])


def _check_batch_norm_gradient(given: Arguments) -> None:
    same_shapes(given, "input", "grad_out")
    inverse = "save_invstd" if "save_invstd" in given else "save_var"
    is_trained = given["train"] if "train" in given else given["update"]
    measured, saved = ["running_mean", "running_var"], ["save_mean", inverse]
    _check_channels(given, saved if is_trained else measured, measured if is_trained else saved)


def _check_layer_norm(given: Arguments) -> None:
    source, inner = given["input"], list(given["normalized_shape"])
    require(inner and list(source.shape[-len(inner) :]) == inner, "normalized_shape is not that of the input")
    _expect_shape(given, "grad_out", source.shape)
    for name in ("mean", "rstd"):
        _expect_length(given, name, prod(source.shape[: -len(inner)]))
    for name in ("weight", "bias"):
        if given[name] is not None:
            _expect_shape(given, name, inner)


def _check_group_norm(given: Arguments) -> None:
    samples, channels, places, groups = (given[name] for name in ("N", "C", "HxW", "group"))
    source = given["input"]
    require(min(samples, channels, places) >= 0 and groups > 0 and channels % groups == 0, "the sizes make no sense")
    require(source.dim() >= 2 and tuple(source.shape[:2]) == (samples, channels), "N or C is another")
    require(source.numel() == samples * channels * places, "HxW is another")
    _expect_shape(given, "grad_out", source.shape)
    for name in ("mean", "rstd"):
        _expect_length(given, name, samples * groups)
    _expect_length(given, "weight", channels, needed=False)


def _check_grid(spatial: int, given: Arguments) -> None:
    source, grid = given["input"], given["grid"]
    require(source.dim() == grid.dim() == spatial + 2, "the numbers of dimensions are wrong")
    require(len(source) == len(grid) and grid.shape[-1] == spatial, "the grid does not fit the input")
    require(prod(source.shape[1:]), "there is nothing to sample")
    require(source.dtype is grid.dtype, "the dtypes differ")
    require(given["interpolation_mode"] in range(3) and given["padding_mode"] in range(3), "there is no such mode")
    if "grad_output" in given:
        require(given["grad_output"].dtype is source.dtype, "the dtypes differ")
        _expect_shape(given, "grad_output", (*source.shape[:2], *grid.shape[1:-1]))


def _check_lstm(given: Arguments, weights: Sequence[str], cell: str) -> None:
    """An LSTM's layer by oneDNN: [steps, samples, width]."""
    source, hidden = given["input"], given["hidden_size"]
    require(given["mode"] == 2 and hidden > 0 and source.dim() == 3, "it is not a layer of an LSTM")
    require(given["has_biases"] and not given["bidirectional"], "it is a layer of another kind")
    require(not given["batch_sizes"], "its samples are packed")
    first, second, *biases = weights
    _expect_shape(given, first, (4 * hidden, source.shape[2]))
    _expect_shape(given, second, (4 * hidden, hidden))
    for name in biases:
        _expect_shape(given, name, (4 * hidden,))
    for name in ("hx_", cell):
        _expect_length(given, name, source.shape[1] * hidden)


def _check_lstm_gradient(given: Arguments) -> None:
    """The workspace is as large as the forward makes it for such sizes."""
    weights, source = ("weight1", "weight2", "weight3", "weight4"), given["input"]
    _check_lstm(given, weights, "cx_tmp")
    steps, samples, hidden = source.shape[0], source.shape[1], given["hidden_size"]
    require(given["train"], "it did not train")
    for name in ("output", "grad_output"):
        if given[name] is not None:
            _expect_shape(given, name, (steps, samples, hidden))
    for name in ("hy_", "cy_", "grad_hy", "grad_cy"):
        if given[name] is not None:
            _expect_length(given, name, samples * hidden)
    tensors = [each for each in given.values() if isinstance(each, Tensor) and each is not given["workspace"]]
    require(len({each.dtype for each in tensors}) == 1, "the dtypes differ")
    blank = [torch.zeros_like(given[name]) for name in ("input", *weights, "hx_", "cx_tmp")]
    facts = [given[name] for name in ("reverse", "batch_sizes", "mode", "hidden_size", "num_layers")]
    forward = torch.ops.aten.mkldnn_rnn_layer.default
    with torch.enable_grad():  # else it makes none
        made = forward(*blank, *facts, True, False, given["batch_first"], True)[3]
    require(given["workspace"].dtype is made.dtype, "the workspace is of another dtype")
    _expect_shape(given, "workspace", made.shape)


def _check_classes(given: Arguments, spatial: int = 0) -> None:
    """A loss over classes: [samples, classes, …], [classes] or a single one, and a class for each."""
    self = given["self"]
    require(self.dim() == spatial + 2 or (self.dim() < 2 and not spatial), "the number of dimensions is wrong")
    shape = self.shape if self.dim() > 1 else (1, self.numel())
    classes, places = shape[1], [shape[0], *shape[2:]]
    _expect_length(given, "target", prod(places))
    require(self.dim() < 2 or list(given["target"].shape) == places, "the target has another shape")
    in_range(given, "target", classes, *([given["ignore_index"]] if "ignore_index" in given else []))
    _expect_length(given, "weight", classes, needed=False)
    if "grad_output" in given:
        is_each = given["reduction"] == 0 and self.dim() > 1
        _expect_length(given, "grad_output", prod(places) if is_each else 1)
    if "total_weight" in given:
        _expect_length(given, "total_weight", 1)


def _check_labels(given: Arguments) -> None:
    same_shapes(given, "self", "target", "is_target")
    require(given["self"].dim() <= 2, "the number of dimensions is wrong")
    in_range(given, "target", given["self"].shape[-1] if given["self"].dim() else 1, -1)
    is_each = given["reduction"] == 0 and given["self"].dim() == 2
    _expect_length(given, "grad_output", len(given["self"]) if is_each else 1)


def _check_windows(given: Arguments) -> None:
    """The gradient of ``unfold``."""
    source = torch.empty(given["input_sizes"], device="meta")
    require(given["size"] > 0, "there are no such windows")
    _expect_shape(given, "grad_in", source.unfold(given["dim"], given["size"], given["step"]).shape)


def _check_pivots(matrix: str, given: Arguments) -> None:
    lu, pivots = given[matrix], given[{"LU": "pivots", "LU_data": "LU_pivots"}[matrix]]
    require(lu.dim() >= 2 and pivots.dtype is torch.int32, "it is not a factorization")
    count = min(lu.shape[-2:])
    require(tuple(pivots.shape) == (*lu.shape[:-2], count), "the pivots are not those of the matrix")
    require(((pivots >= 1) & (pivots <= lu.shape[-2])).all(), "a pivot is out of range")


def _check_sparse_parts(given: Arguments) -> None:
    check_sparse_parts(given["indices"], given["values"], given["size"], given["is_coalesced"])


def _check_whole_division(given: Arguments) -> None:
    """The least integer divided by -1 is none, and the processor ends a process that asks for it."""
    one, other = given["self"], given["other"]
    dtypes = [each.dtype for each in (one, other) if isinstance(each, Tensor)]
    if given.get("rounding_mode") != "trunc" or any(each.is_floating_point or each.is_complex for each in dtypes):
        return
    is_least = isinstance(one, Tensor) and one.dtype is not torch.bool and (one == torch.iinfo(one.dtype).min).any()
    has_minus_one = (other == -1).any() if isinstance(other, Tensor) else other == -1
    require(not (is_least and has_minus_one), "the least integer cannot be divided by -1")


def _check_repeats(given: Arguments) -> None:
    require((given["repeats"] >= 0).all(), "a number of repeats is negative")
    total = int(given["repeats"].sum(dtype=torch.float64))
    require(given["output_size"] in {None, total} and total < 1 << 27, f"{total} repeats")


_BIASED = ("weight0", "weight1", "weight2", "weight3")

CHECKS: dict[str, Check] = {
    "_adaptive_avg_pool2d_backward": partial(_check_pool, 2),
    "_adaptive_avg_pool3d_backward": partial(_check_pool, 3),
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
    "_log_softmax_backward_data": lambda given: same_shapes(given, "output", "grad_output"),
    "_native_batch_norm_legit": _check_batch_norm,
    "_pdist_backward": _check_pair_distances,
    "_scaled_dot_product_flash_attention_for_cpu": _check_heads,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _check_heads_gradient,
    "_segment_reduce_backward": _check_segments,
    "_sparse_coo_tensor_unsafe": _check_sparse_parts,
    "_sparse_coo_tensor_with_dims_and_tensors": _check_sparse_parts,
    "_sparse_mm_reduce_impl_backward": _check_sparse_product,
    "adaptive_max_pool2d_backward": partial(_check_max_pool, 2),
    "adaptive_max_pool3d_backward": partial(_check_max_pool, 3),
    "avg_pool2d_backward": partial(_check_average_pool, 2),
    "avg_pool3d_backward": partial(_check_average_pool, 3),
    "batch_norm_backward": _check_batch_norm_gradient,
    "div": _check_whole_division,
    "div_": _check_whole_division,
    "embedding_dense_backward": _check_embedding,
    "fractional_max_pool2d_backward": partial(_check_fractional_pool, 2),
    "fractional_max_pool3d_backward": partial(_check_fractional_pool, 3),
    "grid_sampler_2d_backward": partial(_check_grid, 2),
    "grid_sampler_3d_backward": partial(_check_grid, 3),
    "linalg_lu_solve": partial(_check_pivots, "LU"),
    "lu_unpack": partial(_check_pivots, "LU_data"),
    "max_pool2d_with_indices_backward": partial(_check_window_pool, 2),
    "max_pool3d_with_indices_backward": partial(_check_window_pool, 3),
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
    **{
        f"{kind}_pad{spatial}d_backward": partial(_check_padding, spatial, kind)
        for kind in ("reflection", "replication")
        for spatial in (1, 2, 3)
    },
    "repeat_interleave": _check_repeats,
    "segment_reduce": _check_segments,
    "unfold_backward": _check_windows,
}
"""Operation, without its overload → the check of its arguments."""
