"""A trainer with checkpoints in a folder, an average for evaluation, and a second stage that resumes."""

import tempfile
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.head = nn.Linear(48, 1)

    def forward(self, x):
        return self.head(self.body(x))


class Trainer:
    def __init__(self, folder):
        self.path = Path(folder) / "last.pt"
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.averaged = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.global_step = 0
        self.lowest, self.kept = float("inf"), None

    def start_from(self, weights):
        weights = {name.removeprefix("net."): value for name, value in weights.items()}
        self.model.load_state_dict(weights, strict=False)

    def save(self):
        torch.save({"state_dict": self.model.state_dict(), "optimizer_states": [self.optimizer.state_dict()],
                    "global_step": self.global_step}, self.path)  # fmt: skip

    def resume(self):
        checkpoint = torch.load(self.path)
        self.model.load_state_dict(checkpoint["state_dict"])
        self.optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        self.global_step = checkpoint["global_step"]

    def validate(self, x, y):
        backup = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(self.averaged.module.state_dict())
        self.model.eval()
        with torch.no_grad():
            loss = nn.functional.mse_loss(self.model(x), y).item()
        if loss < self.lowest:
            self.lowest, self.kept = loss, {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(backup)
        self.model.train()
        return loss

    def fit(self, until, batch, x, y):
        while self.global_step < until:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.1 / (1 + self.global_step / 50)
            inputs, wanted = batch()
            loss = nn.functional.mse_loss(self.model(inputs), wanted)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.averaged.update_parameters(self.model)
            self.global_step += 1
            if self.global_step % 50 == 0:
                self.validate(x, y)


torch.manual_seed(1)


def batch(size=64):
    x = torch.randn(size, 6)
    return x, torch.sin(2 * x[:, :1]) * x[:, 1:2] + 0.5 * x[:, 2:3]


x, y = batch(500)
with tempfile.TemporaryDirectory() as folder:
    first = Trainer(folder)
    first.start_from({f"net.body.{name}": value.clone() for name, value in Net().body.state_dict().items()})
    first.fit(200, batch, x, y)
    first.save()
    second = Trainer(folder)
    second.resume()
    second.fit(500, batch, x, y)
second.model.load_state_dict(second.kept)
with torch.no_grad():
    print("error", nn.functional.mse_loss(second.model(x), y).item())
