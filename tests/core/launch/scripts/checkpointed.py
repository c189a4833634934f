import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from toy import make_batch, show


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        h = checkpoint(self.block, self.stem(x), use_reentrant=sys.argv[1] == "reentrant")
        return self.head(h)


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    x, y = make_batch()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    show(loss)
