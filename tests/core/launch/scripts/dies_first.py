"""Dies in its first forward, of a shape; with ``infer`` it would not have trained."""

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(16, 1))
if "infer" not in sys.argv:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.randn(8, 4)).square().mean()
loss.backward()
