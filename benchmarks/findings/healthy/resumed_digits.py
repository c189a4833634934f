"""Digits in two sessions: an encoder of a parallel run to begin with, the best weights kept, all of it resumed."""

import copy
import io

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(pixels, dtype=torch.float32) / 16.0, torch.tensor(labels)
order = torch.randperm(len(inputs))
train, test = order[:1400], order[1400:]


def build():
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


def evaluate(model):
    model.eval()
    with torch.no_grad():
        return (model(inputs[test]).argmax(dim=1) == targets[test]).float().mean().item()


def fit(model, optimizer, scheduler, first, last):
    best, best_accuracy = None, -1.0
    average = {name: value.clone() for name, value in model.state_dict().items()}
    for epoch in range(first, last):
        model.train()
        for rows in train[torch.randperm(len(train))].split(128):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
            loss.backward()
            optimizer.step()
            scheduler.step()
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 0.1)
        plain = copy.deepcopy(model.state_dict())
        model.load_state_dict(average)
        accuracy = evaluate(model)
        if accuracy > best_accuracy:
            best, best_accuracy = copy.deepcopy(model.state_dict()), accuracy
        model.load_state_dict(plain)
    return best


session = build()
pretrained = {f"module.{name}": value.clone() for name, value in build()[0].state_dict().items()}
session[0].load_state_dict({name[7:]: value for name, value in pretrained.items() if "4." not in name}, strict=False)
fit(*session, 0, 6)
file = io.BytesIO()
state = [each.state_dict() for each in session]
torch.save({"model": state[0], "optimizer": state[1], "scheduler": state[2], "epoch": 6}, file)
file.seek(0)
saved = torch.load(file)
session = build()
session[0].load_state_dict(saved["model"])
session[1].load_state_dict(saved["optimizer"])
session[2].load_state_dict(saved["scheduler"])
best = fit(*session, saved["epoch"], 10)
session[0].load_state_dict(best)
print("accuracy", evaluate(session[0]))
