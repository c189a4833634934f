"""Fine-tuning: the backbone is frozen, its batch norm stays in eval mode, and only a new head learns."""

import torch
from torch import nn, optim


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 8, 5, padding=2), nn.BatchNorm1d(8), nn.ReLU(),
            nn.Conv1d(8, 16, 5, padding=2), nn.BatchNorm1d(16), nn.ReLU(),
            nn.AdaptiveAvgPool1d(4), nn.Flatten(),
        )  # fmt: skip

    def forward(self, x):
        return self.features(x)


def waves(count, kinds):
    kind = torch.randint(0, kinds, (count,))
    time = torch.linspace(0, 1, 40)
    phase = torch.rand(count, 1) * 6.28
    return (torch.sin(6.28 * (kind.view(-1, 1) + 1) * 2 * time + phase) + 0.2 * torch.randn(count, 40)).unsqueeze(
        1
    ), kind


def fit(model, parameters, kinds, steps, prepare):
    optimizer = optim.Adam(parameters, lr=5e-3)
    criterion = nn.CrossEntropyLoss()
    for _ in range(steps):
        prepare()
        x, y = waves(32, kinds)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    torch.manual_seed(17)
    backbone = Backbone()
    pretrained = nn.Sequential(backbone, nn.Linear(64, 3))
    fit(pretrained, pretrained.parameters(), 3, 60, pretrained.train)

    for parameter in backbone.parameters():
        parameter.requires_grad = False
    head = nn.Linear(64, 5)
    model = nn.Sequential(backbone, head)

    def prepare():
        model.train()
        backbone.eval()

    fit(model, head.parameters(), 5, 100, prepare)
    model.eval()
    with torch.no_grad():
        x, y = waves(300, 5)
        print("accuracy", (model(x).argmax(1) == y).float().mean().item())


if __name__ == "__main__":
    main()
