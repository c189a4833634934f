"""A character model: an LSTM over a text, truncated backpropagation through time, clipped gradients."""

import torch
from torch import nn

torch.manual_seed(11)
TEXT = ("the quick brown fox jumps over the lazy dog and runs back to the quiet river " * 12).strip()
vocabulary = sorted(set(TEXT))
index = {letter: number for number, letter in enumerate(vocabulary)}
codes = torch.tensor([index[letter] for letter in TEXT])


class CharModel(nn.Module):
    def __init__(self, letters, width=48):
        super().__init__()
        self.embed = nn.Embedding(letters, 24)
        self.rnn = nn.LSTM(24, width, batch_first=True)
        self.decode = nn.Linear(width, letters)

    def forward(self, letters, state=None):
        hidden, state = self.rnn(self.embed(letters), state)
        return self.decode(hidden), state


def batches(data, rows, length):
    columns = len(data) // rows
    data = data[: rows * columns].view(rows, columns)
    for start in range(0, columns - length - 1, length):
        yield data[:, start : start + length], data[:, start + 1 : start + 1 + length]


def repackage(state):
    return tuple(part.detach() for part in state)


model = CharModel(len(vocabulary))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(14):
    state = None
    for letters, following in batches(codes, 8, 16):
        if state is not None:
            state = repackage(state)
        optimizer.zero_grad()
        logits, state = model(letters, state)
        loss = criterion(logits.reshape(-1, len(vocabulary)), following.reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
print("last loss", round(loss.item(), 4))
