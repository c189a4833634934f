"""``rg.find_kinks``: what it says of models and of losses, and that it leaves them as they are."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.errors import FreedGraphError, NoGraphError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.fc(x))
        apart = self.drop(self.norm(h)) * 0
        return apart.square().sum(1).sqrt()  # the trap


ROOT_LINE = inspect.getsourcelines(Net.forward)[1] + 3


def made() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(6, 4)


def test_the_trap_is_named_with_its_line() -> None:
    net, x = made()
    kinks = rg.find_kinks(net, x)
    kink = kinks[0]
    assert (kink.operation, kink.where, kink.value, kink.total) == ("sqrt", "at 0", 6, 6)
    assert kink.line == f"{__file__}:{ROOT_LINE}"
    assert kink.node == "SqrtBackward0"
    assert kink.gives == "inf"
    assert kink.nonfinite == 6
    assert kink.points == ((0,), (1,), (2,), (3,), (4,))
    assert "not finite" in str(kinks)
    assert kinks[:1] == (kink,)


def test_nothing_of_the_model_changes() -> None:
    net, x = made()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    rg.find_kinks(net, x)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not net._forward_hooks
    assert torch.overrides._get_current_function_mode() is None


def test_a_masked_branch_gives_nothing_that_is_not_finite() -> None:
    """Of ``where(x > 0, x, 1).sqrt()`` no element lies at zero; of the other order all three do."""
    x = torch.tensor([0.0, 0.0, 4.0], requires_grad=True)
    right = torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0).sum()
    wrong = torch.where(x > 0, x.sqrt(), 0.0).sum()
    assert len(rg.find_kinks(right)) == 0
    (kink,) = rg.find_kinks(wrong)
    assert kink.value == 2
    assert kink.nonfinite == int((~torch.autograd.grad(wrong, x)[0].isfinite()).sum()) == 2


def test_a_loss_is_left_as_it_is() -> None:
    net, x = made()
    told = []
    y = net.act(net.fc(x * 0))
    y.register_hook(told.append)
    loss = (y - y).abs().sum()
    (kink,) = rg.find_kinks(loss)
    assert (kink.operation, kink.value, kink.gives) == ("abs", 24, "0")
    assert not told
    assert net.fc.weight.grad is None
    loss.backward()
    assert len(told) == 1


def test_lines_of_a_loss_come_from_recorded_origins() -> None:
    net, x = made()
    with rg.record_origins(net):
        loss = net(x).sum()
    (kink, *_) = rg.find_kinks(loss)
    assert kink.line == f"{__file__}:{ROOT_LINE}"
    assert kink.name == "self"


def test_what_was_not_saved_is_said() -> None:
    net, x = made()
    kinks = rg.find_kinks(net.act(net.fc(x)).sum())
    assert kinks.unseen == {"ReluBackward0": 1}
    assert "1 × ReluBackward0" in str(kinks)


def test_the_loss_function_is_a_part_of_it() -> None:
    kinks = rg.find_kinks(nn.Linear(2, 2), torch.ones(3, 2), lambda out: (out - out.detach()).abs().mean())
    assert [(each.operation, each.value) for each in kinks] == [("abs", 6)]


def test_the_value_is_the_one_that_torch_gave() -> None:
    """Ties of ``amax`` share: one half, one third."""
    x = torch.tensor([[1.0, 1, 0], [2, 2, 2]], requires_grad=True)
    (kink,) = rg.find_kinks(x.amax(1).sum())
    assert kink.gives == "0.3333, 0.5"
    assert kink.value == 5


def test_a_healthy_net_has_none() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))
    kinks = rg.find_kinks(net, torch.randn(5, 4), lambda out: nn.functional.cross_entropy(out, torch.arange(5) % 3))
    assert not kinks
    assert str(kinks) == "no kinks"


def test_a_tuple_and_a_mapping_are_arguments() -> None:
    class Distance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.scale * torch.linalg.vector_norm(self.scale * (x - y))

    x = torch.ones(3)
    for batch in ((x, x), {"x": x, "y": x}):
        (kink,) = rg.find_kinks(Distance(), batch)
        assert (kink.operation, kink.where, kink.gives) == ("norm", "of a zero vector", "0")


def test_what_cannot_be_looked_at_is_said() -> None:
    x = torch.ones(3, requires_grad=True)
    loss = x.abs().sum()
    loss.backward()
    with pytest.raises(FreedGraphError, match="retain_graph"):
        rg.find_kinks(loss)
    with pytest.raises(NoGraphError):
        rg.find_kinks(torch.ones(3))
    with pytest.raises(NoGraphError):
        rg.find_kinks(nn.ReLU(), torch.ones(3))


def test_the_page_holds_the_table() -> None:
    docs = Path(__file__).parents[3] / "docs"
    page = (docs / "kinks.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(docs / "make_kinks.py"))["put_table_in"](page) == page, "run `python docs/make_kinks.py`"


def test_the_modulus_of_a_complex_zero() -> None:
    z = torch.tensor([0j, 1 + 1j], requires_grad=True)
    (kink,) = rg.find_kinks((z * 1).abs().sum())
    assert (kink.operation, kink.points, kink.gives) == ("abs", ((0,),), "0")


@pytest.mark.parametrize("operation", ["sgn", "sqrt", "log", "abs"])
def test_of_a_complex_point_no_rule_of_real_functions_is_said(operation: str) -> None:
    """What torch gives there is what plain autograd gives; the derivative of z/|z| has no limit at 0."""
    z = torch.tensor([0j, 1 + 1j], requires_grad=True)
    result = getattr(z * 1, operation)()
    (kink,) = rg.find_kinks(result.abs().sum() if operation == "log" else torch.view_as_real(result + 0j).sum())
    assert (kink.operation, kink.convention) == ("sign" if operation == "sgn" else operation, "no derivative there")
    bare = torch.zeros(1, dtype=torch.complex64, requires_grad=True)
    out = getattr(bare, operation)()
    (given,) = torch.autograd.grad(out, bare, torch.ones_like(out))
    read = complex(kink.gives)
    for said, right in ((read.real, given.item().real), (read.imag, given.item().imag)):
        assert said == pytest.approx(right, nan_ok=True)


def test_a_model_that_returns_complex_numbers() -> None:
    net = nn.Linear(2, 2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(self.net(x * 0).relu(), x)

    nn.init.zeros_(net.bias)
    assert [kink.operation for kink in rg.find_kinks(Net(), torch.ones(1, 2))] == ["relu"]
