"""A tagger: a transformer encoder over padded sentences; the tags of padding are −100, and most others are 0."""

import torch
from torch import nn

PAD, WORDS, TAGS = 0, 24, 4


class Tagger(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width, padding_idx=PAD)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(width, TAGS)

    def forward(self, words):
        padding = words == PAD
        return self.classifier(self.encoder(self.embedding(words), src_key_padding_mask=padding))


def sentences(count, longest=16):
    words = torch.full((count, longest), PAD)
    for row in range(count):
        length = int(torch.randint(3, 10, ()))
        words[row, :length] = torch.randint(1, WORDS, (length,))
    tags = torch.where(words % 7 == 3, 1 + words % 3, torch.zeros_like(words))
    return words, tags.masked_fill(words == PAD, -100)


torch.manual_seed(12)
tagger = Tagger()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(tagger.parameters(), lr=3e-3)
for step in range(120):
    words, tags = sentences(32)
    logits = tagger(words)
    loss = criterion(logits.view(-1, TAGS), tags.view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
