"""What the three examples of explanations share: a small network for handwritten digits, and a sheet of pictures."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

CELL, GAP, MARGIN = 104, 10, 168  # pixels: one picture, the space between two, the names of the rows
RED, BLUE = torch.tensor([178.0, 24.0, 43.0]), torch.tensor([33.0, 102.0, 172.0])


class DigitNet(nn.Module):
    """Images, [N, 1, 8, 8], to log-probabilities, [N, 10]. ``fc`` gives the scores before the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.relu1 = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()
        self.conv2, self.relu2 = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
        self.conv3, self.relu3 = nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()
        self.fc = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.relu1(self.conv1(images))
        x = self.relu2(self.conv2(x))
        x = self.relu3(self.conv3(x))
        return self.fc(x.mean(dim=(2, 3))).log_softmax(dim=1)


def train_on_digits(epochs: int = 12) -> tuple[DigitNet, Tensor, Tensor]:
    """A trained network, and of each digit the first new image that it tells right: [10, 1, 8, 8] and [10]."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pixels, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    model = DigitNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(1500).split(50):
            optimizer.zero_grad()
            F.nll_loss(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = model(images[1500:]).argmax(dim=1) == labels[1500:]
    print(f"accuracy on {len(right)} images that it has not seen: {right.float().mean():.1%}")
    shown = torch.stack([1500 + (right & (labels[1500:] == digit)).nonzero()[0, 0] for digit in range(10)])
    return model, images[shown], labels[shown]


def paint_digit(image: Tensor) -> Tensor:
    """Ink on paper: [8, 8] to colours, [3, 8, 8]."""
    return (255 * (1 - image)).expand(3, -1, -1)


def paint_signed(values: Tensor) -> Tensor:
    """Red for what speaks for the digit, blue for what speaks against it; by the root, so that little is seen too."""
    share = (values / values.abs().amax().clamp(min=1e-12)).unsqueeze(0)
    strong = torch.where(share > 0, RED.view(3, 1, 1), BLUE.view(3, 1, 1))
    return 255 + (strong - 255) * share.abs().sqrt()


def paint_heat(values: Tensor, image: Tensor) -> Tensor:
    """Red over the faded digit, by bicubic interpolation: a place of the layer is not a pixel."""
    heat = F.interpolate((values / values.amax().clamp(min=1e-12))[None, None], size=(CELL, CELL), mode="bicubic")
    faded = F.interpolate(paint_digit(image / 2)[None], size=(CELL, CELL), mode="nearest")[0]
    return faded + (RED.view(3, 1, 1) - faded) * 0.9 * heat[0].clamp(0, 1)


def write_sheet(path: Path, rows: Mapping[str, list[Tensor]]) -> None:
    """Write rows of pictures, each [3, height, width] in 0…255, with the name of each row before it."""
    columns = max(map(len, rows.values()))
    size = (MARGIN + columns * (CELL + GAP), GAP + len(rows) * (CELL + GAP))
    sheet, font = Image.new("RGB", size, "white"), ImageFont.load_default(18)
    draw = ImageDraw.Draw(sheet)
    for y, (name, pictures) in enumerate(rows.items()):
        top = GAP + y * (CELL + GAP)
        draw.text((GAP, top + CELL // 2), name, "black", font, anchor="lm")
        for x, picture in enumerate(pictures):
            pixels = picture.detach().clamp(0, 255).byte().permute(1, 2, 0).contiguous().numpy()
            left = MARGIN + x * (CELL + GAP)
            sheet.paste(Image.fromarray(pixels).resize((CELL, CELL), Image.Resampling.NEAREST), (left, top))
            draw.rectangle((left - 1, top - 1, left + CELL, top + CELL), outline=(200, 200, 200))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
    print(f"wrote {path}")


def read_output_path(description: str, default: str) -> Path:
    """Where the picture shall go: the only argument of the examples."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "picture", type=Path, nargs="?", default=Path(default), help="PNG to write (default: %(default)s)"
    )
    return parser.parse_args().picture
