"""One-dimensional convolutions with batch norm on signals, RMSprop and a schedule in steps."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


@dataclass
class Settings:
    lr: float = 2e-3
    batch_size: int = 32
    epochs: int = 6
    milestones: list[int] = field(default_factory=lambda: [3, 5])


class Chirps(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 3, (count,), generator=generator)
        time = torch.linspace(0, 1, 64)
        start = 3 + torch.rand(count, 1, generator=generator)
        bend = (self.labels.view(-1, 1) - 1) * 8.0
        self.signals = torch.sin(6.28 * (start * time + bend * time**2))
        self.signals += 0.3 * torch.randn(count, 64, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        return self.signals[number].unsqueeze(0), self.labels[number]


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(1, 12, 7, padding=3)
        self.bn1 = nn.BatchNorm1d(12)
        self.conv2 = nn.Conv1d(12, 24, 5, padding=2)
        self.bn2 = nn.BatchNorm1d(24)
        self.pool = nn.MaxPool1d(4)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(24 * 4, 3)

    def forward(self, x):
        x = self.pool(torch.relu(self.bn1(self.conv1(x))))
        x = self.pool(torch.relu(self.bn2(self.conv2(x))))
        return self.fc(self.drop(x.flatten(1)))


def run_epoch(model, loader, criterion, optimizer=None):
    right = 0
    for signals, labels in loader:
        scores = model(signals)
        if optimizer is not None:
            loss = criterion(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right += (scores.argmax(1) == labels).sum().item()
    return right / len(loader.dataset)


def main(settings):
    torch.manual_seed(0)
    train_loader = DataLoader(Chirps(600, 1), batch_size=settings.batch_size, shuffle=True)
    valid_loader = DataLoader(Chirps(200, 2), batch_size=100)
    model = ConvNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=settings.lr)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=settings.milestones, gamma=0.3)
    for epoch in range(settings.epochs):
        model.train()
        run_epoch(model, train_loader, criterion, optimizer)
        model.eval()
        with torch.no_grad():
            accuracy = run_epoch(model, valid_loader, criterion)
        scheduler.step()
        print(f"epoch {epoch}: {accuracy:.3f}")


main(Settings())
