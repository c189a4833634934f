"""A rank of a training that hangs: the last rank never ends a node that the others wait for it to reach.

Arguments: run folder, file to meet at, how many ranks. ``RANK`` says which one this is.
"""

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import distributed

from retrograd.following.hangs.watch import watch_hangs


class ReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(gradient)
        return gradient


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


def main(run: str, meeting: str, size: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{meeting}", rank=int(os.environ["RANK"]), world_size=size)
    is_last = distributed.get_rank() == size - 1
    watch_hangs(run, limit=0.2, on_signal=signal.SIGUSR1)
    x = torch.ones(3, requires_grad=True)
    for step in range(4):
        y = ReduceGradient.apply(x * 2).sin()
        Sleep.apply(y, 600 if is_last and step == 3 else 0).sum().backward()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
