"""Regression on a table: columns of very different size are standardised, targets too; the rate falls to zero."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR


@dataclass
class Config:
    steps: int = 240
    batch: int = 64
    lr: float = 4e-3
    weight_decay: float = 1e-3
    width: int = 64
    seed: int = 7


class Regressor(nn.Module):
    def __init__(self, columns, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(columns, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
        )
        self.out = nn.Linear(width, 1)

    def forward(self, table):
        return self.out(self.body(table))


def make_table(rows):
    area = torch.rand(rows, 1) * 200 + 30
    year = torch.randint(1900, 2020, (rows, 1)).float()
    rooms = torch.randint(1, 8, (rows, 1)).float()
    distance = torch.rand(rows, 1) * 20000
    price = 3000 * area + 500 * (year - 1900) + 9000 * rooms - 8 * distance + 120000
    price = price + 15000 * torch.sin(distance / 2000) + 2000 * torch.randn(rows, 1)
    return torch.cat([area, year, rooms, distance], dim=1), price


def main(cfg: Config):
    torch.manual_seed(cfg.seed)
    table, price = make_table(1500)
    table = (table - table.mean(0)) / table.std(0)
    mean, std = price.mean(), price.std()
    target = (price - mean) / std

    model = Regressor(4, cfg.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    scheduler = CosineAnnealingLR(optimizer, T_max=cfg.steps)
    for step in range(cfg.steps):
        rows = torch.randint(0, 1200, (cfg.batch,))
        prediction = model(table[rows])
        loss = nn.functional.mse_loss(prediction, target[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        error = (model(table[1200:]) - target[1200:]).square().mean()
    print(f"held-out error {error.item():.4f}")


if __name__ == "__main__":
    main(Config())
