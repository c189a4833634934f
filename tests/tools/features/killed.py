"""A process that extracts until it is killed, and prints the number of each batch that it loads."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from retrograd.core.limits import LIMITS
from retrograd.tools.features.dataset import extract_dataset
from retrograd.tools.features.stored import StoredFeatures

SAMPLES, BATCH = 403, 4


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Rows that follow from their number, and take a moment."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        if index % BATCH == 0:
            print(index // BATCH, flush=True)
        return torch.sin(torch.arange(6.0) * (index + 1)), torch.tensor(index)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)).eval()


def run(folder: Path, seconds: float) -> StoredFeatures:
    LIMITS.shard_bytes = 1500  # a dozen batches a file
    torch.set_num_threads(1)
    loader = DataLoader(Slow(seconds), BATCH)
    return extract_dataset(make_model(), loader, ["0", "2"], folder, target=1, progress=False)


if __name__ == "__main__":
    run(Path(sys.argv[1]), 0.001)
    print("done", flush=True)
