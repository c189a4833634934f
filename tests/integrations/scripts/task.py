"""What the scripts share: a Lightning module, a net for transformers, and their data."""

import logging
import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_data():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(32, 4, generator=generator)
    return x, (x.sum(1) > 0).long()
