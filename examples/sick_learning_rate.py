"""A sick script: the learning rate is so high that the first step kills what is hidden, and nothing is learned."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
pixels, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=3.0)  # the fault: 0.1 trains well
for step in range(200):
    batch = torch.randint(1500, (64,))
    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        print(f"step {step + 1}   loss {loss.item():.4f}")
