"""Train a small residual network on scikit-learn's handwritten digits.

    python examples/train_digits.py --epochs 20 --seed 0

An ordinary PyTorch script: 1,797 real images of 8 x 8 pixels, one fifth of them held out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions around a skip connection; a stride of two halves the image."""

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.skip = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return self.relu(out + self.skip(x))


class DigitNet(nn.Module):
    """Digit images, [N, 1, 8, 8], to class scores, [N, 10]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(
            ResidualBlock(width, width),
            ResidualBlock(width, width),
            ResidualBlock(width, 2 * width, stride=2),
            ResidualBlock(2 * width, 2 * width),
            ResidualBlock(2 * width, 4 * width, stride=2),
            ResidualBlock(4 * width, 4 * width),
        )
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(F.relu(self.stem(images)))
        return self.head(self.dropout(features.mean(dim=(2, 3))))


def load_data(batch_size: int, seed: int) -> tuple[DataLoader, DataLoader]:
    """The training batches, reshuffled every epoch, and the test batches."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=seed)
    shuffle = torch.Generator().manual_seed(seed)
    return (
        DataLoader(TensorDataset(images[train], labels[train]), batch_size, shuffle=True, generator=shuffle),
        DataLoader(TensorDataset(images[test], labels[test]), batch_size=256),
    )


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader, max_norm: float) -> float:
    """One pass over the training data; returns the mean loss of an image."""
    model.train()
    total = 0.0
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        total += loss.item() * len(labels)
    return total / len(batches.dataset)


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader) -> tuple[float, float]:
    """Mean loss of an image, and the share of images told right."""
    model.eval()
    loss, right = 0.0, 0
    for images, labels in batches:
        scores = model(images)
        loss += F.cross_entropy(scores, labels, reduction="sum").item()
        right += int((scores.argmax(dim=1) == labels).sum())
    return loss / len(batches.dataset), right / len(batches.dataset)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=24, help="channels of the first block")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--max-norm", type=float, default=1.0, help="gradients are clipped to this norm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="so small a net gains nothing from more than one")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/digits.pt"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    train_batches, test_batches = load_data(arguments.batch_size, arguments.seed)
    model = DigitNet(arguments.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.epochs)

    for epoch in range(1, arguments.epochs + 1):
        train_loss = train_epoch(model, optimizer, train_batches, arguments.max_norm)
        test_loss, accuracy = evaluate(model, test_batches)
        scheduler.step()
        print(f"epoch {epoch:2d}   train loss {train_loss:.4f}   test loss {test_loss:.4f}   accuracy {accuracy:.2%}")

    arguments.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, arguments.checkpoint)
    print(f"saved {arguments.checkpoint}")


if __name__ == "__main__":
    main()
