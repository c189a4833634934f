"""Trains, and torch warns of the same things at every step; Python prints each of them once."""

import torch
from torch import nn
from toy import Net, make_batch

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(5):
    x, y = make_batch()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    nn.functional.l1_loss(loss.detach(), torch.zeros(1))  # another size: from Python
    turned = torch.zeros(3).T  # deprecated: from C++
    loss.backward()
    optimizer.step()
print(loss.item())
