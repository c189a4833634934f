"""Half of the data have no labels: a teacher that is the mean of students over time says what they should be."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


def network():
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def rings(count):
    label = torch.randint(0, 2, (count,))
    points = F.normalize(torch.randn(count, 2), dim=1) * (0.6 + 0.9 * label.view(-1, 1))
    return points + 0.1 * torch.randn(count, 2), label


torch.manual_seed(18)
student = network()
teacher = copy.deepcopy(student)
teacher.requires_grad_(False)
optimizer = torch.optim.Adam(student.parameters(), lr=6e-3)
for step in range(160):
    known, label = rings(16)
    unknown, _ = rings(64)
    supervised = F.cross_entropy(student(known), label)
    with torch.no_grad():
        goal = teacher(unknown + 0.05 * torch.randn_like(unknown)).softmax(dim=1)
    consistency = F.mse_loss(student(unknown).softmax(dim=1), goal)
    loss = supervised + min(1.0, step / 80) * consistency
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, 0.05)
teacher.eval()
points, label = rings(500)
with torch.no_grad():
    print("accuracy", (teacher(points).argmax(1) == label).float().mean().item())
