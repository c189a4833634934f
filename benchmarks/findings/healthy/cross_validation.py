"""Three models one after the other, one for each fold."""

import torch
from torch import nn


def make_model():
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 1))


def fit_fold(train_x, train_y, valid_x, valid_y, epochs=14):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        model.train()
        for rows in torch.randperm(len(train_x)).split(30):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(train_x[rows]), train_y[rows])
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            valid = nn.functional.mse_loss(model(valid_x), valid_y).item()
    return valid


torch.manual_seed(27)
x = torch.randn(300, 6)
y = x[:, :1] - 2 * x[:, 1:2].abs() + 0.1 * torch.randn(300, 1)
folds = torch.randperm(300).chunk(3)
scores = []
for number, held_out in enumerate(folds):
    kept = torch.cat([fold for other, fold in enumerate(folds) if other != number])
    scores.append(fit_fold(x[kept], y[kept], x[held_out], y[held_out]))
print("mean error", sum(scores) / len(scores))
