"""Running other things in the middle of a forward, as if that did not run, and unseen by those who watch training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import _disable_current_modes

from retrograd.hooks.discovery import ModelDiscovery

_saved = torch._C._autograd


@contextmanager
def unseen_by_discovery() -> Iterator[None]:
    """Within it, nobody who looks for the program's models is told of modules that run: they are none of it."""
    table = modules._global_forward_pre_hooks
    taken = {
        number: hook for number, hook in table.items() if isinstance(getattr(hook, "__self__", None), ModelDiscovery)
    }
    for number in taken:
        del table[number]
    try:
        yield
    finally:
        for number, hook in taken.items():
            if hook.__self__.armed:  # type: ignore[attr-defined]  # else it was disarmed meanwhile
                table[number] = hook


@contextmanager
def isolated_autograd() -> Iterator[None]:
    """Within it, this thread has no default hooks on saved tensors, no dispatch modes, and records gradients.

    So a checkpoint that the forward is in neither drops nor computes again what is saved here, and one that chooses
    which results to keep does not count what is run here. The default device stays.
    """
    hooks = _take_hooks()
    try:
        with _disable_current_modes(), torch.inference_mode(mode=False), torch.enable_grad():
            yield
    finally:
        for pack, unpack in reversed(hooks):
            _saved._push_saved_tensors_default_hooks(pack, unpack)


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """``torch.autograd.backward``, but nobody who listens to backward passes is told: it is none of training."""
    _engine_run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _take_hooks() -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    taken: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
    while (top := _saved._top_saved_tensors_default_hooks(False)) is not None:
        taken.append(top)
        _saved._pop_saved_tensors_default_hooks()
    return taken
