"""The examples of explanations: right by another way to compute them, and their pictures show something."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = ("guided_backpropagation", "grad_cam", "integrated_gradients")


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, ModuleType]]:
    """The examples, imported as they import each other when one is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield {name: import_module(name) for name in ("digits", *NAMES)}
    for name in ("digits", *NAMES):
        del sys.modules[name]


@pytest.fixture(scope="module")
def trained(examples: dict[str, ModuleType]) -> tuple[nn.Module, Tensor, Tensor]:
    model, images, labels = examples["digits"].train_on_digits(epochs=8)
    return model.double(), images.double(), labels


class GuidedReLU(torch.autograd.Function):
    """R = 1[f > 0] · 1[R' > 0] · R', as the paper has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (x > 0) * (gradient > 0) * gradient


class Guided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return GuidedReLU.apply(x)


def test_guided_backpropagation_is_that_of_the_paper(
    examples: dict[str, ModuleType], trained: tuple[nn.Module, Tensor, Tensor]
) -> None:
    model, images, labels = trained
    found = examples["guided_backpropagation"].explain_guided(model, images, labels)
    guided = copy.deepcopy(model)
    guided.relu1 = guided.relu2 = guided.relu3 = Guided()
    images = images.clone().requires_grad_()
    guided(images)  # log-probabilities; what is explained are the scores before
    scores = guided.fc(
        guided.relu3(guided.conv3(guided.relu2(guided.conv2(guided.relu1(guided.conv1(images)))))).mean((2, 3))
    )
    (expected,) = torch.autograd.grad(scores.gather(1, labels[:, None]).sum(), images)
    torch.testing.assert_close(found, expected)
    plain = examples["guided_backpropagation"].explain(model, images, labels)
    assert not torch.allclose(plain, found)


def test_grad_cam_is_that_of_hooks_by_hand(
    examples: dict[str, ModuleType], trained: tuple[nn.Module, Tensor, Tensor]
) -> None:
    model, images, labels = trained
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        kept["activation"] = output
        output.register_hook(lambda gradient: kept.update(gradient=gradient))

    def keep_scores(module: nn.Module, args: Any, output: Tensor) -> None:
        kept["scores"] = output

    handles = [model.relu3.register_forward_hook(keep), model.fc.register_forward_hook(keep_scores)]
    model(images)
    for handle in handles:
        handle.remove()
    kept["scores"][torch.arange(len(labels)), labels].sum().backward()
    activation, gradient = kept["activation"].detach().numpy(), kept["gradient"].numpy()
    expected = np.maximum(np.einsum("nc,nchw->nhw", gradient.mean(axis=(2, 3)), activation), 0)
    found = examples["grad_cam"].explain(model, images, labels)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)
    assert found.shape == (10, 8, 8)


def test_integrated_gradients_add_up(
    examples: dict[str, ModuleType], trained: tuple[nn.Module, Tensor, Tensor]
) -> None:
    model, images, labels = trained
    explain = examples["integrated_gradients"].explain
    scores: list[Tensor] = []
    handle = model.fc.register_forward_hook(lambda module, args, output: scores.append(output.detach()))
    model(images)
    model(torch.zeros_like(images))
    handle.remove()
    gained = (scores[0] - scores[1])[torch.arange(10), labels]
    errors = [(explain(model, images, labels, steps).sum(dim=(1, 2, 3)) - gained).abs().max() for steps in (4, 400)]
    assert errors[1] < 2e-3 * gained.abs().max()
    assert errors[1] < errors[0] / 10


def test_integrated_gradients_of_a_linear_model_are_its_products(examples: dict[str, ModuleType]) -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 10).double()

        def forward(self, images: Tensor) -> Tensor:
            return self.fc(images.flatten(1))

    model, images, classes = Linear(), torch.rand(3, 1, 8, 8, dtype=torch.float64), torch.tensor([4, 0, 9])
    found = examples["integrated_gradients"].explain(model, images, classes, steps=3)
    torch.testing.assert_close(found, model.fc.weight[classes].detach().view(3, 1, 8, 8) * images)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_draws_a_picture(
    examples: dict[str, ModuleType], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "picture.png"
    monkeypatch.setattr(sys, "argv", [name, str(path)])
    examples[name].main()
    digits = examples["digits"]
    picture = np.asarray(Image.open(path))
    height, width, _ = picture.shape
    assert width == digits.MARGIN + 10 * (digits.CELL + digits.GAP)
    tops = range(digits.GAP, height, digits.CELL + digits.GAP)
    for row, top in enumerate(tops):
        strip = picture[top : top + digits.CELL].astype(int)
        assert (strip[:, : digits.MARGIN] < 100).any(), "the row has a name"
        for left in range(digits.MARGIN, width, digits.CELL + digits.GAP):
            cell = strip[:, left : left + digits.CELL]
            assert cell.std() > 5, "there is something to see"
            assert (np.ptp(cell, axis=2).max() > 60) == (row > 0), "digits are grey, explanations coloured"
