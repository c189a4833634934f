"""What nodes have saved, read whatever modes the program is in."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.core.hooks.nodes import peek, saved_tensors_of


class Through(TorchDispatchMode):
    """Carries every operation out, as a mode of the program may."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_number_that_was_saved_can_be_read_under_a_dispatch_mode() -> None:
    x = torch.tensor([1.0, 4.0], requires_grad=True)
    with Through():
        y = x / 2
        saved = {name: peek(raw) for name, raw in saved_tensors_of(y.grad_fn)}
        number = saved["other"]
        assert number is not None
        assert number.shape == ()
        assert bool(torch.isfinite(number))  # an operation takes what was read
    assert float(number) == 2.0


def test_what_is_read_shares_memory_and_its_count_of_writes() -> None:
    x, w = torch.ones(3, requires_grad=True), torch.ones(3)
    y = x * w
    (read,) = (peek(raw) for name, raw in saved_tensors_of(y.grad_fn) if name == "other")
    assert read is not None
    assert read.data_ptr() == w.data_ptr()
    w.add_(1)
    assert read._version == w._version
