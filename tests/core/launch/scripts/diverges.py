"""A learning rate that is far too high; prints the losses and ends as its argument says."""

import sys

import torch
from torch import nn
from toy import Net, make_batch, show

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=1e30)
try:
    for _ in range(12):
        x, y = make_batch(64)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        show(loss)
finally:
    print("left", flush=True)
if sys.argv[1:] == ["raise"]:
    raise ValueError("as planned")
sys.exit(int(*sys.argv[1:]))
