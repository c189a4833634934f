"""Low-rank adapters: frozen weights, and the second factor begins at zero."""

import torch
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + (x @ self.lora_a.t() @ self.lora_b.t()) * self.scaling


def adapt(module):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, LoRALinear(child))
        else:
            adapt(child)


torch.manual_seed(9)
teacher = nn.Linear(16, 6)
model = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 6))
adapt(model)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.0)
for step in range(200):
    x = torch.randn(64, 16)
    with torch.no_grad():
        y = teacher(x)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item())
