"""Sequence to sequence with attention and teacher forcing: reverse the letters; padding is ignored by the loss."""

import torch
from torch import nn

PAD, BOS = 0, 1
LETTERS = 12


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, width, padding_idx=PAD)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, letters):
        return self.gru(self.embedding(letters))


class Decoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, width, padding_idx=PAD)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.combine = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, LETTERS)

    def forward(self, letters, memory, padding, state):
        hidden, _ = self.gru(self.embedding(letters), state)
        scores = hidden @ memory.transpose(1, 2) / memory.shape[-1] ** 0.5
        scores = scores.masked_fill(padding.unsqueeze(1), float("-inf"))
        context = torch.softmax(scores, dim=-1) @ memory
        return self.out(torch.tanh(self.combine(torch.cat([hidden, context], dim=-1))))


def make_batch(size=48, longest=7):
    source = torch.full((size, longest), PAD)
    goal = torch.full((size, longest), PAD)
    for row in range(size):
        length = int(torch.randint(3, longest + 1, ()))
        word = torch.randint(2, LETTERS, (length,))
        source[row, :length] = word
        goal[row, :length] = word.flip(0)
    return source, goal


def main():
    torch.manual_seed(33)
    encoder, decoder = Encoder(40), Decoder(40)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    for step in range(140):
        source, goal = make_batch()
        shifted = torch.cat([torch.full((len(goal), 1), BOS), goal[:, :-1]], dim=1)
        memory, state = encoder(source)
        logits = decoder(shifted, memory, source == PAD, state)
        loss = criterion(logits.flatten(0, 1), goal.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(list(encoder.parameters()) + list(decoder.parameters()), 4.0)
        optimizer.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
