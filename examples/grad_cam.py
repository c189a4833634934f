"""Grad-CAM: which places of the last convolution speak for a digit.

    python examples/grad_cam.py runs/grad_cam.png

Selvaraju et al. 2017, "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import retrograd as rg
from digits import paint_digit, paint_heat, read_output_path, train_on_digits, write_sheet


def explain(model: nn.Module, images: Tensor, classes: Tensor, layer: str = "relu3") -> Tensor:
    """ReLU(Σₖ αₖ Aₖ) with αₖ the mean gradient of the score in channel k: [N, height, width] of the layer."""
    features = rg.extract(model, images, [layer, "fc"], differentiable=True)
    scores = features["fc"].gather(1, classes[:, None])
    (gradients,) = torch.autograd.grad(scores.sum(), features[layer])
    weights = gradients.mean(dim=(2, 3), keepdim=True)
    return (weights * features[layer]).sum(dim=1).relu().detach()


def main() -> None:
    path = read_output_path(__doc__, "runs/grad_cam.png")
    model, images, labels = train_on_digits()
    rivals = labels.roll(-1)
    maps, rival_maps = explain(model, images, labels), explain(model, images, rivals)
    write_sheet(
        path,
        {
            "digit": [paint_digit(image) for image in images[:, 0]],
            "speaks for it": [paint_heat(*each) for each in zip(maps, images[:, 0], strict=True)],
            "for the next digit": [paint_heat(*each) for each in zip(rival_maps, images[:, 0], strict=True)],
        },
    )


if __name__ == "__main__":
    main()
