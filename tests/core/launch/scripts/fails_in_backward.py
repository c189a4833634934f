"""Its second backward pass raises, or is interrupted, in a hook on the output of the body."""

import os
import signal
import sys

import torch
from torch import nn
from toy import Net, make_batch, show

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


class Damp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, step):
        ctx.step = step
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.step == 1 and sys.argv[1] == "raise":
            raise ArithmeticError("as planned")
        if ctx.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return gradient / 2, None


class Damped(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
        self.step = 0

    def forward(self, x):
        y = Damp.apply(self.net.body(x), self.step)
        self.step += 1
        return self.net.head(y)


model = Damped()
for _ in range(3):
    x, y = make_batch()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    show(loss)
