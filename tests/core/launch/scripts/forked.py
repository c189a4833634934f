"""The parent trains two steps, then forked children each train the same net further."""

import multiprocessing

import torch
from torch import nn
from toy import Net, make_batch, show

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def train(steps):
    for _ in range(steps):
        x, y = make_batch()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        show(loss)


train(2)
for steps in (3, 4):
    process = multiprocessing.get_context("fork").Process(target=train, args=(steps,))
    process.start()
    process.join()
train(1)
