"""The nets that are trained: big tensors, middling ones, almost nothing but calls, and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 8192


@dataclass
class Net:
    """A model and what it is trained on.

    Attributes:
        model: what is trained.
        inputs: its only argument.
        loss: from the model's output to a scalar.
    """

    model: nn.Module
    inputs: Tensor
    loss: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        parameters = list(self.model.parameters())
        self._all = torch.optim.AdamW(parameters, lr=1e-3)
        self._last = torch.optim.SGD(parameters[-1:], lr=1e-3)

    def to(self, device: torch.device, memory_format: torch.memory_format) -> None:
        """Move all of it to a device."""
        self.model.to(device, memory_format=memory_format)
        self.inputs = self.inputs.to(device)
        if self.inputs.dim() == 4:
            self.inputs = self.inputs.to(memory_format=memory_format)

    def step(self) -> None:
        """Forward and backward. One small parameter is updated, so that a recorder sees a step and nothing else."""
        self._train(self._last)

    def training_step(self) -> None:
        """Forward, backward, and an update of every parameter by AdamW."""
        self._train(self._all)

    def _train(self, optimizer: torch.optim.Optimizer) -> None:
        self._all.zero_grad()
        self.loss(self.model(self.inputs)).backward()
        optimizer.step()


class Attention(nn.Module):
    """Causal self-attention, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.resid_dropout(self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width)))


class FeedForward(nn.Module):
    """The second half of a GPT-2 block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    """A GPT-2 block: 12 modules with itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """GPT-2's modules and names with random weights: with 6 layers 78 modules are called in a step."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(length, width)
        self.drop = nn.Dropout(0.0)
        self.h = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("positions", torch.arange(length))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(self.positions))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def make_gpt2(
    layers: int = 6, width: int = 384, heads: int = 6, length: int = 128, batch: int = 4, vocabulary: int = VOCABULARY
) -> Net:
    """6 layers, width 384, sequences of 128, batch 4, unless told otherwise."""
    tokens = torch.randint(vocabulary, (batch, length + 1))
    targets = tokens[:, 1:].reshape(-1)
    model = GPT2(layers, width, heads, length, vocabulary)
    targets_on = cache(targets.to)  # a copy in each step would wait for the device
    return Net(
        model, tokens[:, :-1], lambda logits: F.cross_entropy(logits.view(-1, vocabulary), targets_on(logits.device))
    )


def make_gpt2_medium(batch: int = 32) -> Net:
    """24 layers, width 1024, sequences of 1024, 50257 words. The output layer has weights of its own."""
    return make_gpt2(layers=24, width=1024, heads=16, length=1024, batch=batch, vocabulary=50257)


def make_mlp(width: int, batch: int, layers: int = 50) -> Net:
    """Linear layers with tanh between them: 99 places where there are 50 of them."""
    modules = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.Tanh())]
    return Net(nn.Sequential(*modules[:-1]), torch.randn(batch, width), lambda out: out.square().mean())


NETS: dict[str, Callable[[], Net]] = {
    "gpt2": make_gpt2,
    "mlp": lambda: make_mlp(width=256, batch=64),
    "mlp-tiny": lambda: make_mlp(width=32, batch=8),
}


class Cells(nn.Module):
    """An LSTM cell, run step by step: operations of a few microseconds, in modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, sequence: Tensor) -> Tensor:
        hidden = state = torch.zeros_like(sequence[0])
        for each in sequence:
            hidden, state = self.cell(each, (hidden, state))
        return hidden


def make_cells() -> Net:
    """Width 64, sequences of 50, batch 8: 700 tensors of 2 KB are saved."""
    return Net(Cells(64), torch.randn(50, 8, 64), lambda hidden: hidden.square().mean())


class Chain(nn.Module):
    """A thousand times two operations on four elements: nothing but calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for _ in range(1000):
            x = (x * 1.0001).sin()
        return x


TRACED: dict[str, Callable[[], Net]] = {
    "gpt2": make_gpt2,
    "chain of 2,000": lambda: Net(Chain(), torch.ones(4), Tensor.sum),
}
"""What tracing is measured on."""


class Bottleneck(nn.Module):
    """A block of ResNet-50 and its larger kin, with the stride in the 3 x 3 convolution (v1.5).

    He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, 2016, table 1 and figure 5.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += shortcut
        return self.relu(x)


class ResNet(nn.Module):
    """A ResNet of bottlenecks, with the modules and names of torchvision's."""

    def __init__(self, depths: tuple[int, int, int, int], classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs = 64
        for number, depth in enumerate(depths):
            width = 64 * 2**number
            blocks = []
            for index in range(depth):
                blocks.append(Bottleneck(inputs, width, 2 if number and not index else 1))
                inputs = width * Bottleneck.expansion
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


RESNETS = {14: (1, 1, 1, 1), 50: (3, 4, 6, 3), 152: (3, 8, 36, 3)}


def make_resnet(depth: int = 50, batch: int = 4, pixels: int = 96) -> Net:
    """ResNet-50 on small images, unless told otherwise."""
    images = torch.randn(batch, 3, pixels, pixels)
    labels = torch.randint(1000, (batch,))
    labels_on = cache(labels.to)
    return Net(ResNet(RESNETS[depth]), images, lambda logits: F.cross_entropy(logits, labels_on(logits.device)))
