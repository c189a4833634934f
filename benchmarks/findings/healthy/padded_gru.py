"""Sequences of different length, padded: whether the sum of what was marked is positive."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence


class LastState(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.project = nn.Linear(2, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.score = nn.Linear(width, 1)

    def forward(self, padded, lengths):
        features = torch.relu(self.project(padded))
        packed = pack_padded_sequence(features, lengths, batch_first=True, enforce_sorted=False)
        _, last = self.gru(packed)
        return self.score(last[-1]).squeeze(-1)


def sample(count):
    sequences, answers = [], []
    for _ in range(count):
        length = int(torch.randint(3, 16, ()))
        values = torch.randn(length)
        marks = (torch.rand(length) < 0.4).float()
        sequences.append(torch.stack([values, marks], dim=1))
        answers.append(float((values * marks).sum() > 0))
    lengths = torch.tensor([len(one) for one in sequences])
    return pad_sequence(sequences, batch_first=True), lengths, torch.tensor(answers)


def train(model, steps, lr):
    optimizer = torch.optim.RMSprop(model.parameters(), lr=lr)
    loss_function = nn.BCEWithLogitsLoss()
    for step in range(steps):
        padded, lengths, answers = sample(32)
        logits = model(padded, lengths)
        loss = loss_function(logits, answers)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        if step % 40 == 0:
            print(f"step {step} loss {loss.item():.3f}")


def evaluate(model):
    model.eval()
    with torch.no_grad():
        padded, lengths, answers = sample(300)
        right = ((model(padded, lengths) > 0).float() == answers).float().mean()
    return right.item()


if __name__ == "__main__":
    torch.manual_seed(5)
    net = LastState()
    train(net, steps=160, lr=3e-3)
    print(f"right {evaluate(net):.3f}")
