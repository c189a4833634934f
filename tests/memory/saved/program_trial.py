"""A model that is trained by a random program."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.memory.saved.program_pieces import WIDTH


class PlantedError(Exception):
    """Raised by the program itself, in the middle of a pass."""


class Trial:
    """A model that is trained.

    Attributes:
        model: it.
        optimizer: updates it.
        batch: how many rows the next batch has.
        late: losses of which the backward pass comes later.
        seen: tensors that events want to be compared.
    """

    def __init__(self, model: nn.Module, batch: int) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5)
        self.batch = batch
        self.late: list[Tensor] = []
        self.seen: list[Any] = []
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def inputs(self) -> Tensor:
        return torch.randn(self.batch, WIDTH, requires_grad=True)

    def loss(self, x: Tensor | None = None) -> Tensor:
        output = self.model(self.inputs() if x is None else x)
        loss: Tensor = output.float().square().mean()
        self.seen.append(loss.detach().clone())
        return loss

    def forget(self) -> None:
        """After an exception: begin anew with the next batch.

        Of a pass that failed, as much may have been computed again as happened to be asked for before that.
        """
        self.late.clear()
        self.optimizer.zero_grad()
        torch.manual_seed(0)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
