"""A small vision transformer on images that are made: which quadrant holds the bright square."""

import torch
from torch import nn


class PatchEmbedding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.cut = nn.Conv2d(1, width, kernel_size=4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 17, width) * 0.02)

    def forward(self, images):
        patches = self.cut(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1)
        return tokens + self.position


class EncoderLayer(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, width))

    def forward(self, tokens):
        normed = self.norm1(tokens)
        tokens = tokens + self.attention(normed, normed, normed, need_weights=False)[0]
        return tokens + self.feed(self.norm2(tokens))


class VisionTransformer(nn.Module):
    def __init__(self, width=32, heads=4, depth=2, classes=4, dropout=0.1):
        super().__init__()
        self.patches = PatchEmbedding(width)
        self.layers = nn.Sequential(*[EncoderLayer(width, heads, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        tokens = self.layers(self.patches(images))
        return self.head(self.norm(tokens[:, 0]))


def make_images(count):
    images = torch.randn(count, 1, 16, 16) * 0.3
    labels = torch.randint(0, 4, (count,))
    for image, label in zip(images, labels, strict=True):
        top, left = 8 * (label // 2), 8 * (label % 2)
        image[:, top + 2 : top + 6, left + 2 : left + 6] += 1.0
    return images, labels


def main():
    torch.manual_seed(0)
    images, labels = make_images(512)
    test_images, test_labels = make_images(200)
    model = VisionTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    for epoch in range(8):
        model.train()
        for batch in torch.randperm(512).split(32):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(test_images).argmax(-1) == test_labels).float().mean()
        print(f"epoch {epoch} accuracy {accuracy:.3f}")


main()
