"""Graph convolutions on a made network of groups: few nodes have labels."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parameter import Parameter


class GraphConvolution(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = Parameter(torch.empty(in_features, out_features))
        self.bias = Parameter(torch.empty(out_features))
        bound = 1.0 / math.sqrt(out_features)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, features, adjacency):
        return torch.sparse.mm(adjacency, features @ self.weight) + self.bias


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout):
        super().__init__()
        self.gc1 = GraphConvolution(nfeat, nhid)
        self.gc2 = GraphConvolution(nhid, nclass)
        self.dropout = dropout

    def forward(self, x, adj):
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, self.dropout, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)


def make_network(nodes=200, classes=4):
    labels = torch.arange(nodes) % classes
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    edges = (torch.rand(nodes, nodes) < torch.where(same, 0.08, 0.01)).float()
    edges = ((edges + edges.t() + torch.eye(nodes)) > 0).float()
    adjacency = (edges / edges.sum(1, keepdim=True)).to_sparse()
    words = (
        torch.rand(nodes, 60) < 0.05 + 0.1 * (torch.arange(60).unsqueeze(0) % classes == labels.unsqueeze(1))
    ).float()
    return adjacency, words / words.sum(1, keepdim=True).clamp(min=1), labels


torch.manual_seed(42)
adj, features, labels = make_network()
idx_train, idx_test = torch.arange(60), torch.arange(100, 200)
model = GCN(60, 16, 4, 0.5)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
for epoch in range(120):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss_train = F.nll_loss(output[idx_train], labels[idx_train])
    loss_train.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    output = model(features, adj)
print("accuracy", (output[idx_test].argmax(1) == labels[idx_test]).float().mean().item())
