"""Gradients by sample against torch.func, sample by sample, and against .grad, their sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg

KEEP = ["*:inputs", "*:outputs.grad"]

NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)),
        lambda b: torch.randn(b, 3),
    ),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.RMSNorm(4)),
        lambda b: torch.randn(b, 6, 3),
    ),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, 2, 1, 2, 2), lambda b: torch.randn(b, 4, 11)),
    "conv2d": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, (3, 2), (2, 1), "valid", 1, 2), nn.GroupNorm(3, 6), nn.InstanceNorm2d(6, affine=True)
        ),
        lambda b: torch.randn(b, 4, 9, 7),
    ),
    "circular": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), lambda b: torch.randn(b, 2, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, 1, 1), lambda b: torch.randn(b, 2, 4, 3, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2), lambda b: torch.randn(b, 4, 5, 3)),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=1), nn.Linear(4, 2)),
        lambda b: torch.randint(0, 7, (b, 5)),
    ),
}


def loss_of(output: Tensor) -> Tensor:
    return output.pow(3).flatten(1).sum(1).mean()


def record(model: nn.Module, *batches: Tensor) -> rg.Recording:
    with rg.record(model, tensors=KEEP) as recording:
        for batch in batches:
            loss_of(model(batch)).backward()
    return recording


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NETS)
def test_they_are_those_of_each_sample_and_add_up(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    make, draw = NETS[name]
    model, batch = make().double(), draw(2 + seed)
    batch = batch.double() if batch.is_floating_point() else batch
    found = rg.per_sample_gradients(record(model, batch))
    parameters = {each: value.detach() for each, value in model.named_parameters()}

    def loss_of_one(values: dict[str, Tensor], one: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(model, values, (one.unsqueeze(0),))) / len(batch)

    expected = [torch.func.grad(loss_of_one)(parameters, one) for one in batch]
    assert {*found} == {*parameters}
    for each, parameter in model.named_parameters():
        torch.testing.assert_close(found[each], torch.stack([of_one[each] for of_one in expected]))
        torch.testing.assert_close(found[each].sum(0), parameter.grad)
        torch.testing.assert_close(found.norms()[each], found[each].flatten(1).norm(dim=1))


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.twice, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.twice(torch.tanh(self.twice(self.embed(x)))))
        return out


def test_shared_weights_and_several_calls_are_added_up() -> None:
    torch.manual_seed(0)
    model, batch = Tied().double(), torch.randint(0, 7, (3, 5))
    found = rg.per_sample_gradients(record(model, batch))
    assert {*found} == {"embed.weight", "twice.weight", "twice.bias"}
    for name in found:
        torch.testing.assert_close(found[name].sum(0), model.get_parameter(name).grad)


def test_micro_batches_come_after_one_another() -> None:
    torch.manual_seed(0)
    model, first, second = nn.Linear(3, 2).double(), torch.randn(2, 3).double(), torch.randn(4, 3).double()
    found = rg.per_sample_gradients(record(model, first, second))["weight"]
    assert found.shape == (6, 2, 3)
    torch.testing.assert_close(found.sum(0), model.weight.grad)


def test_the_batch_may_be_another_dimension() -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(3, 2).double(), torch.randn(6, 4, 3).double()
    found = rg.per_sample_gradients(record(model, batch), batch_dim=1)["weight"]
    assert found.shape == (4, 2, 3)
    torch.testing.assert_close(found.sum(0), model.weight.grad)


def test_what_mixes_samples_is_refused_with_its_reason() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LSTM(3, 2))
    with rg.record(model, tensors=KEEP) as recording:
        loss_of(model(torch.randn(4, 3))[0]).backward()
    found = rg.per_sample_gradients(recording)
    assert {*found} == {"0.weight", "0.bias"}
    with pytest.raises(rg.RetrogradError, match="mixes the samples"):
        found["1.weight"]
    with pytest.raises(rg.RetrogradError, match="not known"):
        found["2.weight_ih_l0"]


def test_it_says_what_to_keep() -> None:
    model = nn.Linear(3, 2)
    with rg.record(model) as recording:
        loss_of(model(torch.randn(4, 3))).backward()
    with pytest.raises(rg.RetrogradError, match=r"\*:outputs.grad"):
        rg.per_sample_gradients(recording)
    with rg.record(model, tensors="*:outputs.grad") as recording:
        loss_of(model(torch.randn(4, 3))).backward()
    with pytest.raises(rg.RetrogradError, match=r"\*:inputs"):
        rg.per_sample_gradients(recording)["weight"]
