"""Parity of three bits among ten: nothing is learned for a long while, and then at once."""

import torch
from torch import nn

torch.manual_seed(1)
net = nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
criterion = nn.BCEWithLogitsLoss()
for step in range(350):
    bits = torch.randint(0, 2, (128, 10)).float()
    parity = bits[:, :3].sum(dim=1, keepdim=True) % 2
    loss = criterion(net(bits * 2 - 1), parity)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: {loss.item():.4f}")
print(f"loss {loss.item():.4f}")
