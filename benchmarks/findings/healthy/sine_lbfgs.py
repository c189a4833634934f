"""Time-sequence prediction: sine waves, two LSTM cells, LBFGS with a closure."""

import torch
from torch import nn, optim


class Sequence(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, width)
        self.lstm2 = nn.LSTMCell(width, width)
        self.linear = nn.Linear(width, 1)
        self.width = width

    def forward(self, series):
        state1 = state2 = (series.new_zeros(len(series), self.width), series.new_zeros(len(series), self.width))
        outputs = []
        for value in series.split(1, dim=1):
            state1 = self.lstm1(value, state1)
            state2 = self.lstm2(state1[0], state2)
            outputs.append(self.linear(state2[0]))
        return torch.cat(outputs, dim=1)


torch.manual_seed(0)
shift = torch.randint(-80, 80, (24, 1)).float()
data = torch.sin((torch.arange(30).float() + shift) / 4.0)
source, target = data[:, :-1], data[:, 1:]
seq = Sequence()
criterion = nn.MSELoss()
optimizer = optim.LBFGS(seq.parameters(), lr=0.5, max_iter=8)
for step in range(9):

    def closure():
        optimizer.zero_grad()
        out = seq(source)
        loss = criterion(out, target)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    print("step", step, "loss", loss.item())
