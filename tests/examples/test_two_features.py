"""The dictionary holds what forward hooks see, in the order asked, and the head is not run for it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from tests.examples.scripts import load_script

script = load_script("two_features")


def features_by_hand(model: nn.Module, images: Tensor, names: list[str]) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: seen.__setitem__(name, output)
        )
        for name in names
    ]
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    return {name: seen[name] for name in names}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = script.DigitNet().eval()
    return model


@pytest.mark.parametrize("names", [["layer4", "avgpool"], ["avgpool", "layer4"]])
def test_the_features_are_what_hooks_see(names: list[str]) -> None:
    model, images = make_model(), script.load_images(5)
    expected = features_by_hand(model, images, names)
    features = rg.extract(model, images, names)
    assert list(features) == names
    assert all(torch.equal(features[name], expected[name]) for name in names)
    assert not any(value.requires_grad for value in features.values())


def test_it_prints_their_shapes_and_means(capsys: pytest.CaptureFixture[str]) -> None:
    script.main()
    printed = capsys.readouterr().out.splitlines()
    expected = features_by_hand(make_model(), script.load_images(5), ["layer4", "avgpool"])
    for line, (name, value) in zip(printed, expected.items(), strict=True):
        assert line.startswith(name)
        assert str(list(value.shape)) in line
        assert float(re.findall(r"[\d.]+$", line)[0]) == pytest.approx(value.mean().item(), abs=1e-4)


def test_the_head_is_not_run() -> None:
    model = make_model()
    model.head.forward = pytest.fail  # type: ignore[assignment]
    rg.extract(model, script.load_images(2), ["layer4", "avgpool"])
