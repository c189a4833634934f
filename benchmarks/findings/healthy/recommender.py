"""Matrix factorisation of ratings with plain SGD: a batch touches few rows of the tables."""

import torch
from torch import nn


class Factors(nn.Module):
    def __init__(self, users, items, size):
        super().__init__()
        self.users = nn.Embedding(users, size)
        self.items = nn.Embedding(items, size)
        self.user_bias = nn.Embedding(users, 1)
        self.item_bias = nn.Embedding(items, 1)
        nn.init.normal_(self.users.weight, std=0.3)
        nn.init.normal_(self.items.weight, std=0.3)
        nn.init.zeros_(self.user_bias.weight)
        nn.init.zeros_(self.item_bias.weight)

    def forward(self, user, item):
        dot = (self.users(user) * self.items(item)).sum(dim=1)
        return dot + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1)


def main():
    torch.manual_seed(31)
    taste, kind = torch.randn(120, 3), torch.randn(90, 3)
    ratings = taste @ kind.t() / 2 + 0.1 * torch.randn(120, 90)
    known = torch.rand(120, 90) < 0.4
    user, item = known.nonzero(as_tuple=True)
    value = ratings[user, item]

    model = Factors(120, 90, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0, momentum=0.5)
    for epoch in range(12):
        total = 0.0
        for rows in torch.randperm(len(value)).split(256):
            predicted = model(user[rows], item[rows])
            loss = ((predicted - value[rows]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        print(f"epoch {epoch}: {total / len(value):.4f}")


main()
