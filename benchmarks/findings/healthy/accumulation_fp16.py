"""Gradient accumulation over four micro-batches, divided; float16 autocast whose scaler first searches its scale."""

import torch
from torch import nn

torch.manual_seed(10)
MICRO = 4

net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=200)
rule = torch.randn(20, 3)


def loader(batches, size=16):
    for _ in range(batches):
        x = torch.randn(size, 20)
        yield x, (x @ rule).argmax(dim=1)


optimizer.zero_grad()
for number, (x, y) in enumerate(loader(240)):
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
        loss = nn.functional.cross_entropy(logits, y) / MICRO
    scaler.scale(loss).backward()
    if (number + 1) % MICRO == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 3.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

with torch.no_grad():
    x, y = next(loader(1, 500))
    print("accuracy", (net(x).argmax(1) == y).float().mean().item())
