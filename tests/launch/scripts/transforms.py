"""A model that is first run inside a transform, or with weights that have a graph of their own (MAML)."""

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


def inner():
    weights = dict(net.named_parameters())
    gradients = torch.autograd.grad(measure(weights), weights.values(), create_graph=True)
    return {name: each - 0.1 * gradient for (name, each), gradient in zip(weights.items(), gradients, strict=True)}


if sys.argv[1] == "first":
    grad(measure)(dict(net.named_parameters()))
for _ in range(5):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y) if sys.argv[1] == "first" else measure(inner())
    loss.backward()
    optimizer.step()
    show(loss)
