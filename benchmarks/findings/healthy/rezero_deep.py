"""Twelve residual blocks, each behind a factor that begins at zero."""

import torch
import torch.nn as nn


class ReZeroBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear1 = nn.Linear(width, width)
        self.linear2 = nn.Linear(width, width)
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.alpha * self.linear2(torch.relu(self.linear1(x)))


class Deep(nn.Module):
    def __init__(self, width=32, depth=12):
        super().__init__()
        self.first = nn.Linear(10, width)
        self.blocks = nn.ModuleList(ReZeroBlock(width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


torch.manual_seed(0)
weights = torch.randn(10)
model = Deep()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loss_fn = nn.MSELoss()
for step in range(150):
    x = torch.randn(64, 10)
    y = torch.tanh(x @ weights).unsqueeze(1) + 0.3 * x[:, :1] * x[:, 1:2]
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
