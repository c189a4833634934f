"""The bias keeps its bits, and everything else gets the bits that it gets with a bare hook, or with a frozen bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import retrograd as rg
from tests.examples.scripts import load_script

script = load_script("freeze_one_bias")


def make_model() -> Any:
    torch.manual_seed(0)
    return script.Classifier()


def test_it_trains_as_with_a_bare_hook_and_as_with_a_frozen_bias() -> None:
    model = make_model()
    before = model.fc1.bias.detach().clone()
    with rg.rewrite(model, {"fc1:bias.grad": rg.rules.Zero()}):
        script.train(model, 20)
    hooked, frozen = make_model(), make_model()
    hooked.fc1.bias.register_hook(torch.zeros_like)
    frozen.fc1.bias.requires_grad_(False)
    for other in (hooked, frozen):
        script.train(other, 20)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert torch.equal(model.fc1.bias, before)
    assert not torch.equal(model.fc2.bias, make_model().fc2.bias)


def test_it_prints_what_moved(capsys: pytest.CaptureFixture[str]) -> None:
    script.main()
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert [name for name, text in lines.items() if text == "the same bits"] == ["fc1.bias"]
    assert len(lines) == 4
