"""Digits, a plain multilayer perceptron, Adam."""

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)

pixels, labels = load_digits(return_X_y=True)
inputs = torch.tensor(pixels, dtype=torch.float32) / 16.0
targets = torch.tensor(labels)
order = torch.randperm(len(inputs))
train, test = order[:1400], order[1400:]

model = nn.Sequential(
    nn.Linear(64, 96),
    nn.ReLU(),
    nn.Linear(96, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

for epoch in range(8):
    model.train()
    total = 0.0
    for rows in train[torch.randperm(len(train))].split(64):
        optimizer.zero_grad()
        outputs = model(inputs[rows])
        loss = criterion(outputs, targets[rows])
        loss.backward()
        optimizer.step()
        total += loss.item() * len(rows)
    model.eval()
    with torch.no_grad():
        accuracy = (model(inputs[test]).argmax(dim=1) == targets[test]).float().mean().item()
    print(f"epoch {epoch}: loss {total / len(train):.4f}")
print(f"accuracy {accuracy:.4f}")
