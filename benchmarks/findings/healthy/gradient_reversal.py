"""Domain-adversarial training: a Function that is identity forward and turns the gradient round."""

import torch
from torch import nn


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.label = nn.Linear(16, 3)
        self.domain = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x, strength):
        features = self.features(x)
        return self.label(features), self.domain(Reverse.apply(features, strength))


def draw(centres, shift, count=48):
    labels = torch.randint(0, 3, (count,))
    return centres[labels] + shift + 0.5 * torch.randn(count, 8), labels


def main():
    torch.manual_seed(22)
    centres, shift = 2 * torch.randn(3, 8), torch.randn(8)
    model = DANN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    cross_entropy = nn.CrossEntropyLoss()
    for step in range(150):
        strength = 0.3 * min(1.0, step / 80)
        source, labels = draw(centres, 0.0)
        target, _ = draw(centres, shift)
        scores, source_domain = model(source, strength)
        _, target_domain = model(target, strength)
        domains = torch.cat([torch.zeros(48), torch.ones(48)]).long()
        loss = cross_entropy(scores, labels) + cross_entropy(torch.cat([source_domain, target_domain]), domains)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        x, y = draw(centres, shift, 500)
        print("target accuracy", (model(x, 0.0)[0].argmax(1) == y).float().mean().item())


main()
