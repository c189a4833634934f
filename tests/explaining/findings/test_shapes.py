from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from retrograd.core.recording.record import record
from retrograd.explaining.findings.explain import make_record
from retrograd.explaining.findings.record import Record
from tests.explaining.findings.by_hand import ask
from tests.explaining.findings.programs import make_chain, make_program


def chain(*listed: tuple[Any, ...], outputs: tuple[int, ...] = (0,)) -> Record:
    return make_program([make_chain(*listed, outputs=outputs)])


@pytest.mark.parametrize(
    ("output", "target", "is_first"),
    [((8, 1), (8,), True), ((8,), (8, 1), True), ((8, 1), (8,), False), ((8,), (8, 1), False)],
)
def test_what_a_broadcast_loss_is_told_gives_one_shape(
    output: tuple[int, ...], target: tuple[int, ...], is_first: bool
) -> None:
    linear = ("linear", (-1, -1), ((8, 6), (1, 6)), output)
    operands, shapes = ((0, -1), (output, target)) if is_first else ((-1, 0), (target, output))
    [found] = ask("broadcast-loss", chain(linear, ("mse_loss", operands, shapes, ())))
    advice = found.repair.removeprefix("give both the same shape: ").removesuffix(".").split(", or ")
    for each in advice:
        tensors = {"output": torch.zeros(output), "target": torch.zeros(target)}
        name, method = each.split(".")
        tensors[name] = getattr(tensors[name], method.removesuffix("(1)"))(1)
        assert tensors["output"].shape == tensors["target"].shape
    assert len(advice) == 2


@pytest.mark.parametrize("wrap", [spectral_norm, weight_norm, nn.Identity])
@pytest.mark.parametrize("between", [nn.Identity, nn.Tanh])
def test_layers_whose_weights_are_normalised(wrap: Any, between: Any) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.Linear(16, 16)]
    listed = layers if wrap is nn.Identity else [wrap(each) for each in layers]
    net = nn.Sequential(listed[0], between(), listed[1], between(), nn.Linear(16, 1))
    with record(net) as recording:
        net(torch.randn(8, 6)).square().mean().backward()
    net.eval()
    x, y = torch.randn(2, 8, 6)
    with torch.no_grad():
        bent = net(x + y) - net(x) - net(y) + net(torch.zeros(8, 6))  # 0 for what is affine
    assert len(ask("missing-nonlinearity", make_record(recording))) == bool(bent.abs().max() < 1e-5)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("along", [0, 1])
def test_vectors_that_are_normalised_for_their_products(dim: int, along: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.normalize(self.fc(x), dim=dim)

    net = Net()
    with record(net) as recording:
        one, other = net(torch.randn(8, 6)), net(torch.randn(8, 6))
        product = one @ other.t() if along == 1 else one.T @ other
        product.square().mean().backward()
    largest = (one @ one.t() if along == 1 else one.T @ one).diagonal()
    is_cosine = bool(torch.allclose(largest, torch.ones(len(largest))))
    assert len(ask("wrong-dim", make_record(recording))) == (not is_cosine)
