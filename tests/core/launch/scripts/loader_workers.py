import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from toy import Net, show


class Points(Dataset):
    """Each worker runs a net of its own, without training it."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        torch.manual_seed(index)
        lift = nn.Linear(4, 4)
        x = lift(torch.randn(4)).detach()
        return x, (x.sum() > 0).long()


def main():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(Points(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1])
    for _ in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            show(loss)


if __name__ == "__main__":
    main()
