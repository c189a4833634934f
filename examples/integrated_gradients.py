"""Integrated gradients: what each pixel adds to a digit's score, compared with an empty image.

    python examples/integrated_gradients.py runs/integrated_gradients.png

Sundararajan, Taly & Yan 2017, "Axiomatic Attribution for Deep Networks". The contributions add up to the difference
of the two scores, which the example prints beside their sum. It is negative where the empty image has the higher score.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import retrograd as rg
from digits import paint_digit, paint_signed, read_output_path, train_on_digits, write_sheet


def explain(model: nn.Module, images: Tensor, classes: Tensor, steps: int = 64) -> Tensor:
    """(x − x₀) ∫ ∂F(x₀ + α (x − x₀)) / ∂x dα with x₀ = 0, by the midpoint rule: as large as the images."""
    gradients = torch.zeros_like(images)
    for step in range(steps):
        points = (images * (step + 0.5) / steps).requires_grad_()
        scores = rg.extract(model, points, "fc", differentiable=True)["fc"]  # before the softmax, which is not run
        gradients += torch.autograd.grad(scores.gather(1, classes[:, None]).sum(), points)[0]
    return images * gradients / steps


def main() -> None:
    path = read_output_path(__doc__, "runs/integrated_gradients.png")
    model, images, labels = train_on_digits()
    contributions = explain(model, images, labels)
    full, empty = (rg.extract(model, each, "fc")["fc"] for each in (images, torch.zeros_like(images)))
    for label, total, gained in zip(labels, contributions.sum(dim=(1, 2, 3)), (full - empty).diag(), strict=True):
        print(f"digit {label}: contributions {total:7.3f}, difference of the scores {gained:7.3f}")
    write_sheet(
        path,
        {
            "digit": [paint_digit(image) for image in images[:, 0]],
            "for and against": [paint_signed(values) for values in contributions[:, 0]],
        },
    )


if __name__ == "__main__":
    main()
