"""A model that is called with grad only within the backward of a Function, as solvers of equations do it."""

import torch
from torch import nn
from toy import show

torch.manual_seed(0)


class Euler(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f, y, *parameters):
        ctx.f, ctx.parameters = f, parameters
        for _ in range(3):
            y = y + 0.1 * f(y)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        totals = [0] * len(ctx.parameters)
        for _ in range(3):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                slope = ctx.f(y)
            change, *shares = torch.autograd.grad(slope, (y, *ctx.parameters), gradient)
            totals = [total + 0.1 * share for total, share in zip(totals, shares, strict=True)]
            y, gradient = y.detach() - 0.1 * slope.detach(), gradient + 0.1 * change
        return None, gradient, *totals


f = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(f.parameters(), lr=0.01)
for _ in range(4):
    optimizer.zero_grad()
    loss = Euler.apply(f, torch.randn(8, 4), *f.parameters()).square().mean()
    loss.backward()
    optimizer.step()
    show(loss)
