"""Rules that nobody asks: the module's forward is called by name, or runs in code that was compiled before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg

Call = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self, *, by_name: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)
        self.by_name = by_name

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a.forward(x) if self.by_name else self.a(x)
        out: Tensor = self.b(h.tanh())
        return out


@pytest.mark.parametrize("site", ["a:output.grad", "*:output.grad", "a:output", "a:input.input.grad"])
def test_a_forward_that_is_called_by_name_is_said_after_the_first_pass(site: str) -> None:
    net = Net()
    with rg.rewrite(net, {site: rg.rules.Scale(0.5)}):
        out = net(torch.randn(2, 4)).sum()
        with pytest.warns(rg.RetrogradWarning, match="No rule has acted at a: .* forward is called by name") as said:
            out.backward()
        net(torch.randn(2, 4)).sum().backward()
    assert len(said) == 1
    assert "compile" not in str(said[0].message)


def test_without_a_pass_it_is_said_at_the_end() -> None:
    net = Net()
    with (
        pytest.warns(rg.RetrogradWarning, match="never reached. No hook runs where a forward is called by name"),
        rg.rewrite(net, {"a:output": rg.rules.Zero()}),
        torch.no_grad(),
    ):
        net(torch.randn(2, 4))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.spare = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x)[0]
        return out


def test_a_module_that_is_not_used_and_one_inside_of_torchs_own_are_not_said() -> None:
    net = Attention()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with rg.rewrite(net, {"*:output.grad": rg.rules.Scale(0.5)}):
            net(torch.randn(3, 1, 4)).sum().backward()


def test_a_graph_from_before_the_rules_says_nothing() -> None:
    net = Net(by_name=False)
    compiled: Any = torch.compile(lambda x: x * 2, backend="aot_eager")  # other code, which has nothing to do with it
    compiled(torch.ones(2))
    out = net(torch.randn(2, 4)).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with rg.rewrite(net, {"*:output.grad": rg.rules.Scale(0.5)}):
            out.backward()
            net(torch.randn(2, 4)).sum().backward()


COMPILED: dict[str, Callable[[nn.Module], Call]] = {
    "model": lambda net: torch.compile(net, backend="aot_eager"),
    "forward": lambda net: torch.compile(net.forward, backend="aot_eager"),
    "function": lambda net: torch.compile(lambda x: net(x), backend="aot_eager"),
}


@pytest.mark.parametrize("site", ["a:output", "a:output.grad", "a:weight"])
@pytest.mark.parametrize("kind", COMPILED)
def test_code_that_was_compiled_before_is_said(kind: str, site: str) -> None:
    net, x = Net(by_name=False), torch.randn(2, 4)
    call = COMPILED[kind](net)
    call(x).sum().backward()
    net.zero_grad()
    with pytest.warns(rg.RetrogradWarning, match=r"No rule has acted at .* call torch\.compiler\.reset\(\) first"):  # noqa: SIM117
        with rg.rewrite(net, {site: rg.rules.Zero()}):
            call(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compiler.reset()
        if site != "a:weight":  # which breaks the graph, with a warning of its own
            with rg.rewrite(net, {site: rg.rules.Zero()}):
                call(x).sum().backward()


def test_a_compiled_model_is_told_of_when_it_is_called() -> None:
    """Also in inference, and not where the model is called as it is."""
    net, x = Net(by_name=False), torch.randn(2, 4)
    compiled: Any = torch.compile(net, backend="eager")
    with torch.no_grad():
        compiled(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with rg.rewrite(net, {"b:output": rg.rules.Zero()}):
                assert not net(x).any()
        rewriting = rg.rewrite(net, {"b:output": rg.rules.Zero()})
        with pytest.warns(rg.RetrogradWarning, match="No rule has acted at b: the model runs in code"):
            assert compiled(x).all()
        rewriting.remove()
    assert not compiled._forward_hooks
    assert not compiled._forward_pre_hooks


def test_a_recording_says_what_it_has_not_seen(tmp_path: Path) -> None:
    net = Net()
    with rg.record(net, tmp_path / "run"):
        net(torch.randn(2, 4)).sum().backward()
    history = rg.open_run(tmp_path / "run").history
    with pytest.raises(rg.RetrogradError, match="its weights got gradients: its forward is called by"):
        history["a:output"]
