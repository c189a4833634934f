"""Two models one after the other, of which the second is run as torch's hooks do not see it, or by a closure."""

import sys

import torch
from torch import nn
from toy import show

torch.manual_seed(0)


class Quiet(nn.Linear):
    """A module with a call of its own, as all of GPyTorch's."""

    def __call__(self, x):
        return self.forward(x)


class Inside(torch.autograd.Function):
    """Runs a model only while gradients are switched off, and again in the backward."""

    @staticmethod
    def forward(ctx, net, x, *parameters):
        ctx.net, ctx.parameters = net, parameters
        ctx.save_for_backward(x)
        return net(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            output = ctx.net(ctx.saved_tensors[0])
        return None, None, *torch.autograd.grad(output, ctx.parameters, gradient)


def train(net, make, scale, call=None, closure=False):
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    optimizer = make(net.parameters())
    x = torch.randn(32, 3)
    y = (x @ torch.ones(3, 1)) * scale

    def step():
        optimizer.zero_grad()
        loss = ((call or net)(x) - y).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(10):
        loss = optimizer.step(step) if closure else step()
        if not closure:
            optimizer.step()
        show(loss)


def adam(parameters):
    return torch.optim.Adam(parameters, 0.1)


first = Quiet(3, 1) if sys.argv[1] == "quiet" else nn.Linear(3, 1)
train(first, adam, 1.0)
if sys.argv[1] == "closure":
    second = nn.Linear(3, 1)
    train(second, lambda parameters: torch.optim.LBFGS(parameters, max_iter=1), 3.0, closure=True)
elif sys.argv[1] == "inside":
    second = nn.Linear(3, 1)
    train(second, adam, 3.0, call=lambda x: Inside.apply(second, x, *second.parameters()))
else:
    second = Quiet(3, 1) if sys.argv[1] == "quiet" else nn.Linear(3, 1)
    train(second, adam, 3.0)
