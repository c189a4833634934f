"""What a trial of a model must leave as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from retrograd.randomness import random_kept


@contextmanager
def everything_restored(model: nn.Module) -> Iterator[None]:
    """Buffers and the random state are afterwards what they were, also after an error."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_inference()
    ]
    with random_kept():
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, copy in buffers:
                    module._buffers[name] = buffer
                    buffer.data.copy_(copy)  # a graph that has saved it need not know: it is what it was
