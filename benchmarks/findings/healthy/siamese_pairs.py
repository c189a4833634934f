"""A Siamese network with shared weights: are two pictures of one kind?"""

import torch
from torch import nn


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten()
        )
        self.fc = nn.Sequential(nn.Linear(2 * 16 * 9, 48), nn.ReLU(inplace=True), nn.Linear(48, 1))
        self.sigmoid = nn.Sigmoid()
        self.cnn.apply(self.init_weights)
        self.fc.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward_once(self, x):
        return self.cnn(x)

    def forward(self, input1, input2):
        first, second = self.forward_once(input1), self.forward_once(input2)
        output = torch.cat(((first - second).abs(), first * second), 1)
        return self.sigmoid(self.fc(output))


def bars(count):
    upright = torch.rand(count) < 0.5
    images = 0.2 * torch.randn(count, 1, 10, 10)
    for image, stands in zip(images, upright, strict=True):
        place = int(torch.randint(4, 6, ()))
        if stands:
            image[0, :, place] += 1
        else:
            image[0, place, :] += 1
    return images, upright


torch.manual_seed(1)
model = SiameseNetwork()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
criterion = nn.BCELoss()
model.train()
for step in range(130):
    (left, left_kind), (right, right_kind) = bars(32), bars(32)
    targets = (left_kind == right_kind).float()
    optimizer.zero_grad()
    outputs = model(left, right).squeeze()
    loss = criterion(outputs, targets)
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"{step} Loss: {loss.item():.6f}")
model.eval()
with torch.no_grad():
    (left, left_kind), (right, right_kind) = bars(200), bars(200)
    pred = (model(left, right).squeeze() > 0.5) == (left_kind == right_kind)
print(f"accuracy {pred.float().mean().item():.3f}")
