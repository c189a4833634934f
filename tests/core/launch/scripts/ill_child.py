"""The parent trains well, and a child, whose standard error it prints, never clears its gradients."""

import subprocess
import sys

import torch
from torch import nn
from toy import Net, make_batch, show

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
clears = len(sys.argv) == 1
for _ in range(6 if clears else 12):
    x, y = make_batch()
    if clears:
        optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
show(loss)
if clears:
    print(subprocess.run([sys.executable, __file__, "child"], check=True, capture_output=True, text=True))
