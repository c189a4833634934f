"""Bags of words: most inputs are zero by nature, and half of the units at a time too."""

import torch
from torch import nn


class TopicNet(nn.Module):
    def __init__(self, words, topics):
        super().__init__()
        self.hidden = nn.Linear(words, 48)
        self.dropout = nn.Dropout(0.3)
        self.topics = nn.Linear(48, topics)

    def forward(self, counts):
        return self.topics(self.dropout(torch.relu(self.hidden(counts))))


def corpus(count, frequencies):
    topic = torch.randint(0, len(frequencies), (count,))
    counts = torch.poisson(frequencies[topic])
    return torch.log1p(counts), topic


def accuracy(model, data):
    model.eval()
    with torch.no_grad():
        counts, topic = data
        right = (model(counts).argmax(dim=1) == topic).float().mean().item()
    model.train()
    return right


def main():
    torch.manual_seed(13)
    frequencies = torch.distributions.Gamma(0.3, 1.0).sample((6, 100)) * 0.6
    train, test = corpus(900, frequencies), corpus(300, frequencies)
    model = TopicNet(100, 6)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    for epoch in range(8):
        for rows in torch.randperm(900).split(45):
            loss = criterion(model(train[0][rows]), train[1][rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.3f} accuracy {accuracy(model, test):.3f}")


main()
