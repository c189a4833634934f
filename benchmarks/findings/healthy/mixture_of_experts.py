"""A sparse mixture of experts: the best expert alone runs, and some are never chosen."""

import torch
from torch import nn
from torch.nn import functional as F


class SparseMixture(nn.Module):
    def __init__(self, width, experts=6):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x):
        weights = self.gate(x).softmax(dim=-1)
        best, chosen = weights.max(dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero(as_tuple=True)[0]
            if len(rows):
                out = out.index_add(0, rows, best[rows].unsqueeze(1) * expert(x[rows]))
        return x + out


class Classifier(nn.Module):
    def __init__(self, inside=12, width=24, classes=4):
        super().__init__()
        self.inlet = nn.Linear(inside, width)
        self.mixture = SparseMixture(width)
        self.outlet = nn.Linear(width, classes)

    def forward(self, x):
        return self.outlet(self.mixture(F.gelu(self.inlet(x))))


torch.manual_seed(14)
centres = 2 * torch.randn(8, 12)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
right = 0.0
for step in range(150):
    group = torch.randint(0, 8, (64,))
    x, y = centres[group] + 0.8 * torch.randn(64, 12), group % 4
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    right = 0.9 * right + 0.1 * (logits.argmax(1) == y).float().mean().item()
print(f"accuracy {right:.3f}")
