import torch
from torch import nn
from toy import show


def make_net(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 8), nn.LeakyReLU(0.2), nn.Linear(8, outputs))


torch.manual_seed(0)
generator = make_net(2, 4)
critic = make_net(4, 1)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
criterion = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)
for _ in range(3):
    fake = generator(torch.randn(8, 2))
    critic_optimizer.zero_grad()
    real_loss = criterion(critic(torch.randn(8, 4) + 3), ones)
    real_loss.backward()
    fake_loss = criterion(critic(fake.detach()), zeros)
    fake_loss.backward()
    critic_optimizer.step()
    generator_optimizer.zero_grad()
    loss = criterion(critic(fake), ones)
    loss.backward()
    generator_optimizer.step()
    show(real_loss + fake_loss)
    show(loss)
