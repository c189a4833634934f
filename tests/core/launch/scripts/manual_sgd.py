import sys

import torch
from torch import nn
from toy import Net, make_batch, show

torch.manual_seed(0)
net = Net()
for _ in range(3):
    x, y = make_batch()
    net.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    if sys.argv[1] == "data":
        for parameter in net.parameters():
            parameter.data.add_(parameter.grad.data, alpha=-0.1)
    else:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
    show(loss)
