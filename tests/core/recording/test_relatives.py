"""What belongs to a gradient: its value, and what went into that very call. dW = Σ gradientᵀ · input, by autograd."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from retrograd.core.errors import NoSuchSiteError, NothingKeptError
from retrograd.core.history.history import History
from retrograd.core.history.series import Series

CHECKPOINTS = {"plain": None, "checkpointed": False, "reentrant": True}


class Shared(nn.Module):
    """Calls one square layer three times, in place between, and one layer with two arguments once."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.bi = nn.Bilinear(4, 4, 2)
        self.use_reentrant = use_reentrant

    def part(self, x: Tensor) -> Tensor:
        return self.fc(self.relu(self.fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x).tanh()
        x = self.part(x) if self.use_reentrant is None else checkpoint(self.part, x, use_reentrant=self.use_reentrant)
        return self.bi(x, x.square())


def train(net: nn.Module, steps: int = 3, micros: int = 1) -> list[dict[str, Tensor]]:
    """The gradients of each micro-batch alone, from plain autograd."""
    found = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micros):
            before = {name: 0 if each.grad is None else each.grad.clone() for name, each in net.named_parameters()}
            net(torch.randn(5, 4, dtype=torch.float64)).square().sum().backward()
            found.append({name: each.grad - before[name] for name, each in net.named_parameters()})  # type: ignore[operator]
        optimizer.step()
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # reentrant checkpoints complain
            net(torch.randn(5, 4, dtype=torch.float64))  # an evaluation in between belongs to nothing
    return found


def weight_gradient(gradients: Series, step: int, micro: int) -> Tensor:
    pairs = zip(gradients.tensors, gradients.input.tensors, strict=True)
    parts = [g.tensor.T @ x.tensor for g, x in pairs if (g.step, g.micro) == (step, micro)]  # type: ignore[union-attr]
    return sum(parts[1:], parts[0])


@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("stored", [False, True])
def test_the_gradient_of_a_weight_is_made_of_gradients_and_inputs(tmp_path: Path, how: str, stored: bool) -> None:
    net = Shared(CHECKPOINTS[how]).double()
    tensors = rg.Keep(["fc:outputs.grad", "fc:inputs", "bi:outputs.grad", "bi:inputs"], copy=True)
    with rg.record(net, tmp_path / "run" if stored else None, sites="fc:output.grad", tensors=tensors) as recording:
        expected = train(net, micros=2)
    history = recording.history
    gradients = history["fc:output.grad"]
    assert gradients.calls == [1, 2, 3]
    for number, truth in enumerate(expected):
        step, micro = divmod(number, 2)
        torch.testing.assert_close(weight_gradient(gradients, step, micro), truth["fc.weight"], rtol=1e-12, atol=1e-12)
        one = [weight_gradient(history[f"fc#{call}:output.grad"], step, micro) for call in (1, 2, 3)]
        torch.testing.assert_close(sum(one[1:], one[0]), truth["fc.weight"], rtol=1e-12, atol=1e-12)
    two = history["bi:output.grad"]
    with pytest.raises(NoSuchSiteError, match=r"inputs\['input1'\]"):
        _ = two.input
    recorders = zip(two.tensors, two.inputs["input1"].tensors, two.inputs["input2"].tensors, expected, strict=True)
    for g, x, y, truth in recorders:
        bilinear = torch.einsum("bo,bi,bj->oij", g.tensor, x.tensor, y.tensor)
        torch.testing.assert_close(bilinear, truth["bi.weight"], rtol=1e-12, atol=1e-12)


def test_an_input_that_its_module_overwrites_is_said_to_be_lost() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)).double()
    with rg.record(net, sites="1:output.grad", tensors=["1:output.grad", "1:inputs"]) as recording:
        net(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    (kept,) = recording.history["1:output.grad"].input.tensors
    assert kept.overwritten
    assert kept.tensor is None


def test_the_value_is_the_output_and_never_the_input() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    seen: list[tuple[Tensor, Tensor]] = []
    net[1].register_forward_hook(lambda module, args, output: seen.append((args[0].detach(), output.detach())))
    with rg.record(net, sites="*", tensors=["1:output", "1:output.grad", "1:inputs"]) as recording:
        net(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
    gradient = recording.history["1:output.grad"]
    ((input_, output),) = seen
    assert (gradient.value.site, gradient.input.site) == ("1:output", "1:input.input")
    assert gradient.value.l2[0] == pytest.approx(output.norm().item())
    assert gradient.input.l2[0] == pytest.approx(input_.norm().item())
    assert torch.equal(gradient.value.tensors[0].tensor, output)  # type: ignore[arg-type]
    assert torch.equal(gradient.input.tensors[0].tensor, input_)  # type: ignore[arg-type]
    assert recording.history["1:input.input.grad"].value.site == "1:input.input"
    assert recording.history["1:output"].input.l2[0] == gradient.input.l2[0]


def record_one(**choices: object) -> History:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with rg.record(net, **choices) as recording:  # type: ignore[arg-type]
        rg.watch("h", net(torch.randn(2, 3))).sum().backward()
    return recording.history


def test_what_was_not_recorded_is_named() -> None:
    history = record_one(sites=["0:output.grad", "0:weight.grad", "watch/h.grad"])
    for name, said in (("value", "'0:output'"), ("input", "'0:inputs'"), ("inputs", "'0:inputs'")):
        with pytest.raises(NoSuchSiteError) as caught:
            getattr(history["0:output.grad"], name)
        assert said in caught.value.repair
    for name in ("0:weight.grad", "watch/h.grad"):
        with pytest.raises(NoSuchSiteError, match="which has no input"):
            _ = history[name].input
    with pytest.raises(NoSuchSiteError, match="'0:weight'"):
        _ = history["0:weight.grad"].value


def test_a_tensor_that_has_no_partner_is_missed_and_not_paired_with_another() -> None:
    history = record_one(sites="*", tensors="0:output.grad")
    with pytest.raises(NoSuchSiteError, match=r"for '0:output.grad' at step 0"):
        _ = history["0:output.grad"].input.tensors
    assert history["0:output.grad"].input.rms.shape == (1,)


def test_a_tensor_of_a_site_that_has_none_says_why() -> None:
    history = record_one(sites="*", tensors=["0:input.input.grad", "0:inputs"])
    with pytest.raises(NothingKeptError, match=r"(?s)tensors='0:input.input.grad'.*requires? grad"):
        history["0:input.input.grad"].tensors[-1]
    with pytest.raises(IndexError):
        history["1:output"].tensors[0]
    assert history["1:output"].tensors[-5:] == []
    assert len(history["0:input.input"].tensors) == 1
    with pytest.raises(IndexError):
        history["0:input.input"].tensors[7]


def test_a_site_of_which_only_tensors_are_kept_can_be_read() -> None:
    history = record_one(sites="0:output", tensors="1:output")
    assert len(history["1:output"].tensors) == 1
    assert len(history["1:output"].steps) == 0
    history = record_one(statistics=False, tensors=["1:output.grad", "1:output"])
    assert len(history["1:output.grad"].value.tensors) == 1


def test_several_passes_over_one_forward_have_its_input_each() -> None:
    net = nn.Linear(3, 3).double()
    with rg.record(net, sites="self:output.grad", tensors=["self:output.grad", "self:inputs"]) as recording:
        output = net(torch.randn(2, 3, dtype=torch.float64))
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
    gradient = recording.history["self:output.grad"]
    dw = sum(g.tensor.T @ x.tensor for g, x in zip(gradient.tensors, gradient.input.tensors, strict=True))
    torch.testing.assert_close(dw, net.weight.grad, rtol=1e-12, atol=1e-12)
