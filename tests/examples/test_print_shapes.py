"""What is printed is what hooks by hand see, in their order; and nothing is changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from tests.examples.scripts import load_script

script = load_script("print_shapes")


def shapes_by_hand(model: nn.Module, images: Tensor) -> list[str]:
    """Lines as the example's, from hooks on modules and on what they return."""
    lines: list[str] = []

    def see(site: str, tensor: Tensor) -> None:
        lines.append(f"{site:24} {list(tensor.shape)}")
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: lines.append(f"{site + '.grad':24} {list(gradient.shape)}"))

    def hook(path: str, module: nn.Module) -> None:
        def after(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, Tensor):
                see(f"{path}:output", output)
            else:
                see(f"{path}:output.0", output[0])
                see(f"{path}:output.1.0", output[1][0])
                see(f"{path}:output.1.1", output[1][1])

        module.register_forward_hook(after)

    for name, module in model.named_modules():
        hook(name or "self", module)
    model(images).sum().backward()
    return lines


def of_layers(lines: list[str]) -> list[str]:
    """Without the containers: what they return is their last layer's, and of one tensor bare hooks run inner first."""
    return [line for line in lines if not line.startswith(("self:", "encoder:"))]


def test_it_prints_what_hooks_by_hand_see(capsys: pytest.CaptureFixture[str]) -> None:
    script.main()
    printed = capsys.readouterr().out.splitlines()
    expected = shapes_by_hand(script.Captioner(), torch.randn(4, 3, 16, 16))
    assert sorted(printed) == sorted(expected)
    forward = [line for line in expected if ".grad" not in line]
    assert printed[: len(forward)] == forward
    assert of_layers(printed[len(forward) :]) == of_layers(expected[len(forward) :])


def test_looking_changes_nothing() -> None:
    torch.manual_seed(0)
    model, images = script.Captioner(), torch.randn(4, 3, 16, 16)
    expected = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
    with rg.rewrite(model, {"*:output*": lambda value, state: None}):
        found = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
