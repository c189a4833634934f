"""No optimizer at all: parameters are moved by hand, under no_grad."""

import torch
from torch import nn

torch.manual_seed(91)
model = nn.Sequential(nn.Linear(3, 24), nn.Sigmoid(), nn.Linear(24, 1))
lr, decay = 0.3, 1e-4
for step in range(200):
    x = torch.randn(64, 3)
    y = (x.sum(dim=1, keepdim=True) > 0).float()
    loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= lr * (parameter.grad + decay * parameter)
            parameter.grad.zero_()
print(f"loss {loss.item():.4f}")
