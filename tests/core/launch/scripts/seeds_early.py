# ruff: noqa: E402, NPY002, F401
import atexit
import random

random.seed(1)
atexit.register(lambda: print(random.random()))

import numpy as np

np.random.seed(2)

import torch
from torch import nn
from toy import Net, make_batch, show

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    x, y = make_batch()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x * random.random() + np.random.rand()), y)
    loss.backward()
    optimizer.step()
    show(loss)
    if step == 2:
        import rich.style  # draws from `random` when it is loaded for the first time
print(random.random(), np.random.rand(), torch.rand(()).item())
