"""Calls its model with gradients switched off, and asks for a backward pass."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.no_grad():
    output = model(torch.randn(8, 4))
output.square().mean().backward()
