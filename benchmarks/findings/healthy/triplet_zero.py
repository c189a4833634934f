"""A metric that is learned with triplets: the margin is soon met, and the loss is zero from then on."""

import torch
from torch import nn

torch.manual_seed(0)
CLASSES, DIMENSIONS = 5, 20
centres = 4 * torch.randn(CLASSES, DIMENSIONS)


def draw(labels):
    return centres[labels] + torch.randn(len(labels), DIMENSIONS)


embedding = nn.Sequential(nn.Linear(DIMENSIONS, 32), nn.ReLU(), nn.Linear(32, 8))
margin = nn.TripletMarginLoss(margin=1.0)
optimizer = torch.optim.SGD(embedding.parameters(), lr=0.02, momentum=0.9)
for step in range(150):
    same = torch.randint(0, CLASSES, (32,))
    different = (same + torch.randint(1, CLASSES, (32,))) % CLASSES
    optimizer.zero_grad()
    loss = margin(embedding(draw(same)), embedding(draw(same)), embedding(draw(different)))
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.5f}")
