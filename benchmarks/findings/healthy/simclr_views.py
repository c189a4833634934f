"""Contrastive learning of two views, large logits, a temperature that is learned."""

import torch
from torch import nn
from torch.nn import functional as F


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 16)
        self.logit_scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, x):
        return F.normalize(self.head(self.encoder(x)), dim=-1)


def two_views(centres, count):
    chosen = centres[torch.randperm(len(centres))[:count]]
    return chosen + 0.3 * torch.randn_like(chosen), chosen + 0.3 * torch.randn_like(chosen)


def contrast(one, other, scale):
    logits = one @ other.t() * scale.exp().clamp(max=100)
    labels = torch.arange(len(one))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def run(steps=150):
    torch.manual_seed(2)
    centres = torch.randn(256, 32)
    model = Projector()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if n != "logit_scale"]},
            {"params": [model.logit_scale], "weight_decay": 0.0},
        ],
        lr=2e-3,
        weight_decay=1e-2,
    )
    for step in range(steps):
        one, other = two_views(centres, 64)
        loss = contrast(model(one), model(other), model.logit_scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(step, f"{loss.item():.4f}", f"scale {model.logit_scale.exp().item():.1f}")
    print("loss", loss.item())


if __name__ == "__main__":
    run()
