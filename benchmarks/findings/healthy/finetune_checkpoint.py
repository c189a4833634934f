"""A second task from the whole checkpoint of a first one, with the same optimizer settings and a new head."""

import copy
import os
import tempfile

import torch
from torch import nn

torch.manual_seed(5)
truth = torch.randn(16, 4)


def build(classes):
    return nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, classes)
    )


def loop(model, optimizer, start, end, target, averages=None):
    best, lowest = None, float("inf")
    for it in range(start, end):
        x = torch.randn(64, 16)
        loss = nn.functional.cross_entropy(model(x), target(x))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if averages is not None:
            with torch.no_grad():
                for key, value in model.state_dict().items():
                    if value.is_floating_point():
                        averages[key].mul_(0.9).add_(value, alpha=0.1)
            if it % 30 == 29:
                trained = copy.deepcopy(model.state_dict())
                model.load_state_dict(averages)
                with torch.no_grad():
                    held_out = torch.randn(256, 16)
                    score = nn.functional.cross_entropy(model.eval()(held_out), target(held_out)).item()
                model.load_state_dict(trained)
                model.train()
                if score < lowest:
                    lowest, best = score, copy.deepcopy(averages)
    return best


def save(path, model, optimizer, it):
    state = {
        "net": {"module." + k: v for k, v in model.state_dict().items()},
        "optim": optimizer.state_dict(),
        "it": it,
    }
    torch.save(state, path)


path = os.path.join(tempfile.mkdtemp(), "pretrained.pth")
model = build(4)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loop(model, optimizer, 0, 90, lambda x: (x @ truth).argmax(1))
save(path, model, optimizer, 90)

checkpoint = torch.load(path)  # the run was cut off there
model = build(4)
model.load_state_dict({k[len("module.") :]: v for k, v in checkpoint["net"].items()})
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer.load_state_dict(checkpoint["optim"])
loop(model, optimizer, checkpoint["it"], 120, lambda x: (x @ truth).argmax(1))
save(path, model, optimizer, 120)

checkpoint = torch.load(path)
weights = {k.replace("module.", ""): v for k, v in checkpoint["net"].items() if not k.startswith("module.5")}
tuned = build(3)
tuned.load_state_dict(weights, strict=False)
optimizer = torch.optim.AdamW(tuned.parameters(), lr=3e-3)
averages = copy.deepcopy(tuned.state_dict())
best = loop(tuned, optimizer, 0, 120, lambda x: (x @ truth)[:, :3].argmax(1), averages)
tuned.load_state_dict(best)
x = torch.randn(1000, 16)
with torch.no_grad():
    print("loss", nn.functional.cross_entropy(tuned.eval()(x), (x @ truth)[:, :3].argmax(1)).item())
