"""A compiled model, with the backend that keeps torch's own kernels."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(12, 32)
        self.b = nn.Linear(32, 32)
        self.c = nn.Linear(32, 3)

    def forward(self, x):
        x = torch.relu(self.a(x))
        return self.c(x + torch.relu(self.b(x)))


torch.manual_seed(23)
rule = torch.randn(12, 3)
model = torch.compile(Net(), backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(100):
    x = torch.randn(64, 12)
    y = (x @ rule).argmax(dim=1)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item())
