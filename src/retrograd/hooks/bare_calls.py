"""Running a copy of a module as if nobody had set a hook on it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def strip_hooks(module: nn.Module) -> None:
    """Take all hooks off a module and the modules in it. Only for copies: they do not come back."""
    for each in module.modules():
        for name in _TABLES:
            table: dict[int, Any] | None = vars(each).get(name)
            if table:
                table.clear()


class NoTensorHooks(TorchFunctionMode):
    """Within it, ``tensor.register_hook`` does nothing: not for the module's own code either."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.register_hook:
            return RemovableHandle(OrderedDict())
        return func(*args, **(kwargs or {}))
