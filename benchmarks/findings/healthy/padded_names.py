"""A language model of names of different length: padding is masked in attention, and ignored by the loss."""

import torch
import torch.nn.functional as F
from torch import nn

PAD, END, LETTERS, LONGEST = 0, 1, 15, 20


class Names(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, width, padding_idx=PAD)
        self.places = nn.Parameter(0.02 * torch.randn(LONGEST, width))
        self.qkv = nn.Linear(width, 3 * width)
        self.feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.SiLU(), nn.Linear(64, width))
        self.out = nn.Linear(width, LETTERS)

    def forward(self, names):
        x = self.letters(names) + self.places[: names.shape[1]]
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        real = names != PAD
        seen = torch.ones(names.shape[1], names.shape[1], dtype=torch.bool).tril()
        allowed = seen & real[:, None, :]
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.out(x + self.feed(x))


def sample(count):
    names = torch.full((count, LONGEST), PAD)
    for row in range(count):
        length = int(torch.randint(3, 8, ()))
        first = torch.randint(2, LETTERS, ())
        names[row, :length] = (first + 3 * torch.arange(length)) % (LETTERS - 2) + 2
        names[row, length] = END
    return names


torch.manual_seed(4)
model = Names()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(120):
    names = sample(32)
    logits = model(names[:, :-1])
    loss = F.cross_entropy(logits.transpose(1, 2), names[:, 1:], ignore_index=PAD)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
names = sample(64)
with torch.no_grad():
    loss = F.cross_entropy(model(names[:, :-1]).transpose(1, 2), names[:, 1:], ignore_index=PAD)
print(f"loss {loss.item():.4f}")
