"""Calls of torch's loss functions, shown while somebody listens.

``nn.CrossEntropyLoss`` calls ``F.cross_entropy``, and that a built-in function, which is looked up anew each time.
Another function in its place would be seen: by torch.jit, which knows built-in functions by their identity, and by
torch.compile, which makes its table of them once, when it first compiles. So they stay what they are, and only the way
in which Python calls them changes: see ``_builtins.c``. Without a compiler nothing is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from retrograd.core.hooks.engine import grad_enabled, is_abstract, is_in_backward, uncompiled
from retrograd.core.hooks.listeners import Listeners, Patch, Undo
from retrograd.core.hooks.native import native

_ELEMENTS, _CLASSES, _NOTHING = range(3)
"""What the mean is taken over: elements of the input, targets that are not ignored, or what is not told here."""

_FUNCTIONS: dict[Any, tuple[str, int, int]] = {
    torch._C._nn.cross_entropy_loss: ("NllLoss", 3, _CLASSES),
    torch._C._nn.nll_loss_nd: ("NllLoss", 3, _CLASSES),
    torch._C._nn.mse_loss: ("MseLoss", 2, _ELEMENTS),
    torch._C._nn.l1_loss: ("L1Loss", 2, _ELEMENTS),
    torch._C._nn.smooth_l1_loss: ("SmoothL1Loss", 2, _ELEMENTS),
    torch._C._nn.huber_loss: ("HuberLoss", 2, _ELEMENTS),
    torch._C._nn.binary_cross_entropy: ("BinaryCrossEntropy", 3, _ELEMENTS),
    torch.binary_cross_entropy_with_logits: ("BinaryCrossEntropyWithLogits", 4, _ELEMENTS),
    torch.kl_div: ("KlDiv", 2, _NOTHING),
    torch.ctc_loss: ("CtcLoss", 5, _NOTHING),
}
"""Function → the name of its node, where its ``reduction`` stands among its arguments, what the mean is taken over."""

_MEAN, _SUM = 1, 2


class LossListener(Protocol):
    """Shown losses that are computed without grad."""

    def loss_computed(self, kind: str, loss: Tensor, count: Callable[[], int | Tensor] | None) -> None:
        """Take a loss; must not raise.

        Args:
            kind: the name of the node that it would have with grad: ``"NllLoss"``.
            loss: what the function returned.
            count: of a sum, counts what it is over; None of a mean.
        """


@uncompiled
def _show(function: Any, args: tuple[Any, ...], loss: Tensor) -> None:
    if grad_enabled() or is_in_backward() or is_abstract():
        return
    kind, place, over = _FUNCTIONS[function]
    reduction = args[place] if len(args) > place else None  # F gives it by its place
    if reduction == _MEAN or (reduction == _SUM and over != _NOTHING):
        count = partial(_count_targets, args, over) if reduction == _SUM else None
        for listener in loss_listeners.all:
            listener.loss_computed(kind, loss, count)


def _count_targets(args: tuple[Any, ...], over: int) -> int | Tensor:
    given: Tensor = args[0]
    target: Tensor = args[1]
    if over == _ELEMENTS:
        return given.numel()
    if target.is_floating_point():  # a distribution for each
        return given.numel() // given.shape[1 if given.dim() > 1 else 0]
    return (target != (args[4] if len(args) > 4 else -100)).sum()


def _install() -> Iterator[Undo]:
    if native is not None:
        show_calls, functions = native.show_calls, tuple(_FUNCTIONS)
        yield lambda: show_calls(functions, None)
        show_calls(functions, _show)


loss_listeners: Listeners[LossListener] = Listeners(Patch(_install))
"""Are shown what torch's loss functions return, in whatever thread. While there are none, nothing of ours is called."""


def find_loss_function(root: Tensor) -> str:
    """The kind of loss function that a backward pass starts from, but for factors; empty where it is another one."""
    node, left = root.grad_fn, 4
    while node is not None and left and node.name().startswith(("Mul", "Div")):
        node, left = node.next_functions[0][0], left - 1
    name = node.name() if node is not None else ""
    return max((kind for kind, *_ in _FUNCTIONS.values() if name.startswith(kind)), key=len, default="")
