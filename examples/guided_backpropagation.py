"""Guided backpropagation: gradients of a digit's score that let nothing negative pass a ReLU.

    python examples/guided_backpropagation.py runs/guided_backpropagation.png

Springenberg et al. 2015, "Striving for Simplicity: The All Convolutional Net", section 3.4.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import retrograd as rg
from digits import paint_digit, paint_signed, read_output_path, train_on_digits, write_sheet


def explain(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """The gradient of each image's score: as large as the images."""
    images = images.clone().requires_grad_()
    scores = rg.extract(model, images, "fc", differentiable=True)["fc"].gather(1, classes[:, None])
    return torch.autograd.grad(scores.sum(), images)[0]


def explain_guided(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """The same, with the negative part of the gradient left out at the output of every ReLU."""
    with rg.rewrite(model, {"relu*:output.grad": rg.rules.KeepSign()}):
        return explain(model, images, classes)


def main() -> None:
    path = read_output_path(__doc__, "runs/guided_backpropagation.png")
    model, images, labels = train_on_digits()
    plain, guided = explain(model, images, labels), explain_guided(model, images, labels)
    write_sheet(
        path,
        {
            "digit": [paint_digit(image) for image in images[:, 0]],
            "gradient": [paint_signed(values) for values in plain[:, 0]],
            "guided": [paint_signed(values) for values in guided[:, 0]],
        },
    )


if __name__ == "__main__":
    main()
