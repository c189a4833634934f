"""Attention by hand that reverses letters: learned positions, soft pooling of a context, one loss for all places."""

import torch
import torch.nn.functional as F
from torch import nn


class Mixer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).reshape(b, t, d))


class Reverser(nn.Module):
    def __init__(self, letters=8, width=32):
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(80, width)
        self.mix = nn.Sequential(Mixer(width, 4), Mixer(width, 4))
        self.vote = nn.Linear(width, 1)
        self.head = nn.Linear(2 * width, letters)

    def forward(self, ids):
        places = torch.arange(ids.size(1), device=ids.device)
        hidden = self.mix(self.letters(ids) + self.places(places))
        votes = torch.softmax(self.vote(hidden), dim=1)
        context = (votes * hidden).sum(dim=1, keepdim=True)
        return self.head(torch.cat([hidden, context.expand_as(hidden)], dim=-1))


torch.manual_seed(3)
model = Reverser()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for step in range(250):
    ids = torch.randint(0, 8, (48, 6))
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flip(1).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(step, loss.item())
print("loss", loss.item())
