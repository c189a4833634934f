"""Trains, and warns of the same things at every step; Python prints each of them once."""

import warnings

import torch
from torch import nn
from toy import Net, make_batch, show


class Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        warnings.warn("an old backward", FutureWarning, stacklevel=1)
        return gradient


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(5):
    warnings.warn("an old loop", UserWarning, stacklevel=1)
    x, y = make_batch()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(Old.apply(net(x)), y)
    loss.backward()
    optimizer.step()
    show(loss)
