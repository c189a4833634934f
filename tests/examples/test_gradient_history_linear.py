"""The layer does what hooks and a list by hand do, passes gradcheck where it damps nothing, and goes on as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.examples.scripts import load_script

script = load_script("gradient_history_linear")


def train_by_hand() -> tuple[nn.Module, list[float]]:
    """The same net of torch's own layers, with a bare hook on the output and norms in a list."""
    norms: list[float] = []

    def damp(gradient: Tensor) -> Tensor:
        norm = gradient.double().norm().item()
        past = norms[-8:]
        scale = min(1.0, 2 * sum(past) / len(past) / norm) if past else 1.0
        norms.append(norm * scale)
        return gradient * scale

    twin = script.make_model()
    linear = nn.Linear(64, 32)
    linear.load_state_dict(twin[0].state_dict())
    model = nn.Sequential(linear, *twin[1:])
    linear.register_forward_hook(lambda module, args, output: output.register_hook(damp) and None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels, weight in script.make_batches():
        optimizer.zero_grad()
        (weight * nn.functional.cross_entropy(model(images), labels)).backward()
        optimizer.step()
    return model, norms


def test_it_trains_as_a_hook_and_a_list_do() -> None:
    model = script.make_model()
    seen = script.train(model, list(script.make_batches()))
    by_hand, norms = train_by_hand()
    assert [norm for _, norm in seen] == pytest.approx(norms, rel=1e-4)
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_it_goes_on_from_a_checkpoint_with_the_same_memory(capsys: pytest.CaptureFixture[str]) -> None:
    whole = script.train(script.make_model(), list(script.make_batches()))
    script.main()
    rows = re.findall(r"^ *(\d+) +(\d+) +([\d.]+) +([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == [8, 9, 18, 19, 28, 29, 38, 39, 48, 49, 58, 59]
    for step, weighs, loss, norm in rows:
        assert int(weighs) == (50 if int(step) % 10 == 9 else 1)
        assert (float(loss), float(norm)) == pytest.approx(whole[int(step)], abs=1e-3)


def test_its_gradients_are_those_of_a_linear_layer_before_it_has_a_past() -> None:
    def fresh(*arguments: Tensor) -> Any:
        return script.GradientHistoryLinear(3, 2)(*arguments)

    arguments = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 3), (2, 3), (2,))]
    assert torch.autograd.gradcheck(fresh, arguments)
