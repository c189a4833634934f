"""Three models one after the other, each with an evaluation with grad."""

import torch
from torch import nn
from toy import make_batch, show

torch.manual_seed(0)


def train(net, optimizer):
    for _ in range(10):
        x, y = make_batch()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        show(loss)
    net(make_batch()[0]).argmax(1)


for _ in range(3):
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(net, optimizer)
