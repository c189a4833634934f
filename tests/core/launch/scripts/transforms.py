"""A model that is first run inside a transform, or whose weights have a graph of their own."""

import sys

import torch
from torch import nn
from torch.func import functional_call, grad
from toy import show

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def measure(weights):
    return nn.functional.cross_entropy(functional_call(net, weights, (x,)), y)


def learn(meta):
    """Train the net for two steps by a learned optimizer: its weights have a graph of their own then."""
    total, layer = 0.0, net[2]
    weight = layer.weight.detach().clone().requires_grad_()
    for _ in range(2):
        layer._parameters["weight"] = weight
        loss = nn.functional.cross_entropy(net(x), y)
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        weight, total = weight + meta(gradient.reshape(-1, 1)).reshape_as(weight), total + loss
    return total


if sys.argv[1] == "first":
    grad(measure)(dict(net.named_parameters()))
    meta = None
else:
    meta = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(meta.parameters(), lr=0.01)
for _ in range(5):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y) if meta is None else learn(meta)
    loss.backward()
    optimizer.step()
    show(loss)
