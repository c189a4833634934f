"""Checks of what slides over an image: pools, paddings, grids and unfolded windows.

Their backward formulas trust autograd to hand them what the forward gave; see ``call_checks``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch

from retrograd.following.bundles.call_arguments import CallArguments, Check, require


def _fill(values: Sequence[int], length: int) -> list[int]:
    """Spread a setting over the dimensions: a single number stands for all."""
    return list(values) * length if len(values) == 1 else list(values)


def _count_windows(spatial: int, given: CallArguments) -> tuple[int, ...]:
    """Count the windows of a pooling along each dimension."""
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


def _check_pool(spatial: int, given: CallArguments) -> None:
    """The gradient has the samples and channels of the source."""
    gradient, self = given["grad_output"], given["self"]
    require(
        gradient.dim() == self.dim() and self.dim() in {spatial + 1, spatial + 2}, "the numbers of dimensions differ"
    )
    require(gradient.shape[:-spatial] == self.shape[:-spatial], "samples or channels differ")
    require(prod(self.shape[-spatial:]) and prod(gradient.shape[-spatial:]), "there is nothing to pool")


def _check_max_pool(spatial: int, given: CallArguments) -> None:
    _check_pool(spatial, given)
    given.expect_shape("indices", given["grad_output"].shape)
    given.expect_indices("indices", prod(given["self"].shape[-spatial:]))


def _check_average_pool(spatial: int, given: CallArguments) -> None:
    _check_pool(spatial, given)
    _expect_window_count(spatial, given)
    require(given["divisor_override"] != 0, "divisor_override is 0")


def _check_window_pool(spatial: int, given: CallArguments) -> None:
    _check_max_pool(spatial, given)
    _expect_window_count(spatial, given)


def _expect_window_count(spatial: int, given: CallArguments) -> None:
    """The gradient has an element for each window."""
    windows = _count_windows(spatial, given)
    require(tuple(given["grad_output"].shape[-spatial:]) == windows, f"there are {windows} windows")


def _check_padding(spatial: int, kind: str, given: CallArguments) -> None:
    self, padding = given["self"], list(given["padding"])
    require(self.dim() in {spatial + 1, spatial + 2} and len(padding) == 2 * spatial, "the dimensions do not fit")
    shape = list(self.shape)
    for index in range(spatial):
        before, after = padding[2 * index : 2 * index + 2]
        is_near = kind == "replication" or max(before, after) < shape[-1 - index]
        require(is_near, "there is more padding than there is to reflect")
        require(shape[-1 - index] > 0 and shape[-1 - index] + before + after > 0, "nothing is left")
        shape[-1 - index] += before + after
    given.expect_shape("grad_output", shape)


def _check_fractional_pool(spatial: int, given: CallArguments) -> None:
    require(tuple(given["grad_output"].shape[-spatial:]) == tuple(given["output_size"]), "output_size is another")
    _check_max_pool(spatial, given)


def _check_grid(spatial: int, given: CallArguments) -> None:
    source, grid = given["input"], given["grid"]
    require(source.dim() == grid.dim() == spatial + 2, "the numbers of dimensions are wrong")
    require(len(source) == len(grid) and grid.shape[-1] == spatial, "the grid does not fit the input")
    require(prod(source.shape[1:]), "there is nothing to sample")
    require(source.dtype is grid.dtype, "the dtypes differ")
    require(given["interpolation_mode"] in range(3) and given["padding_mode"] in range(3), "there is no such mode")
    if "grad_output" in given:
        require(given["grad_output"].dtype is source.dtype, "the dtypes differ")
        given.expect_shape("grad_output", (*source.shape[:2], *grid.shape[1:-1]))


def _check_windows(given: CallArguments) -> None:
    """The gradient of ``unfold``."""
    source = torch.empty(given["input_sizes"], device="meta")
    require(given["size"] > 0, "there are no such windows")
    given.expect_shape("grad_in", source.unfold(given["dim"], given["size"], given["step"]).shape)


_IMAGES_AND_VOLUMES: dict[str, Callable[[int, CallArguments], None]] = {
    "_adaptive_avg_pool{}d_backward": _check_pool,
    "adaptive_max_pool{}d_backward": _check_max_pool,
    "avg_pool{}d_backward": _check_average_pool,
    "fractional_max_pool{}d_backward": _check_fractional_pool,
    "grid_sampler_{}d_backward": _check_grid,
    "max_pool{}d_with_indices_backward": _check_window_pool,
}
"""Operations that there are for images and for volumes, and the check that is told how many dimensions slide."""

WINDOW_CHECKS: dict[str, Check] = {
    **{name.format(n): partial(check, n) for name, check in _IMAGES_AND_VOLUMES.items() for n in (2, 3)},
    **{
        f"{kind}_pad{spatial}d_backward": partial(_check_padding, spatial, kind)
        for kind in ("reflection", "replication")
        for spatial in (1, 2, 3)
    },
    "unfold_backward": _check_windows,
}
"""Operation, without its overload → the check of its arguments."""
