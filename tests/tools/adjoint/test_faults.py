"""Faults that are planted are found, by the name of the module and of the argument or parameter; right twins pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from retrograd.tools.adjoint.adjoint_check import AdjointCheck, Verdict
from retrograd.tools.adjoint.check import check_adjoint
from tests.by_hand import make_function
from tests.tools.adjoint.planted import Applied, TwoWays, complex_linear, linear, product, squared, with_jvp

BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.body = nn.Sequential(nn.LayerNorm(6), layer)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)))


def faults(check: AdjointCheck) -> dict[str, str]:
    return {str(row.site): row.reason for row in check.faults}


@pytest.mark.parametrize(
    ("fault", "site", "words"),
    [
        ("transposed weight", "body.1:input.x", "a weight is transposed"),
        ("missing factor", "body.1:weight", "0.5 times the right gradient"),
        ("flipped sign", "body.1:input.x", "its sign is flipped"),
        ("ignored bias", "body.1:bias", "no gradient arrives"),
        ("missing sum over the batch", "body.1:bias", "no simple pattern"),
        ("mean over the batch", "body.1:bias", "0.125 times the right gradient"),
        ("transposed gradient", "body.1:weight", "the transpose of the right gradient"),
        ("wrong in one element", "body.1:weight", "no simple pattern"),
    ],
)
def test_a_wrong_custom_backward_is_found_and_named(fault: str, site: str, words: str) -> None:
    torch.manual_seed(1)
    check = check_adjoint(Net(linear(fault)), BATCH)
    assert not check
    (reason,) = [reason for name, reason in faults(check).items() if name == site]
    assert faults(check).keys() == {site}
    assert words in reason
    assert check.rows[0].site.path == "body.1"
    assert "body.1 (Layer) is at fault" in str(check)


def test_the_right_one_passes() -> None:
    torch.manual_seed(1)
    check = check_adjoint(Net(linear("")), BATCH)
    assert check
    assert {row.verdict for row in check} == {Verdict.OK}
    assert {str(row.site) for row in check} >= {"body.1:input.x", "body.1:weight", "body.1:bias", "self:input.x"}


def test_what_lies_around_a_fault_is_blamed_on_it() -> None:
    torch.manual_seed(1)
    check = check_adjoint(Net(linear("transposed weight")), BATCH)
    around = {row.caller_name: row.reason for row in check if row.verdict is Verdict.WRONG and row not in check.faults}
    assert around == {"self": "because of body.1", "body": "because of body.1"}


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.parametrize(
    ("make", "sites", "words"),
    [
        (lambda wrong: product(ignores_second=wrong), ["Product:input.args.1"], ""),
        (lambda wrong: squared(overwrites=wrong), ["Odd:input.x"], ""),
        (lambda wrong: with_jvp(0.5 if wrong else 1.0), ["Odd:input.x"], ""),
        (lambda wrong: complex_linear(conjugates=not wrong), ["self:input.x", "self:weight"], "a complex conjugate is"),
    ],
    ids=["ignores an argument", "overwrites what it kept", "forward mode shares the fault", "forgets to conjugate"],
)
def test_a_function_and_its_right_twin(make: Any, sites: list[str], words: str, wrong: bool) -> None:
    torch.manual_seed(2)
    dtype = torch.complex64 if "complex" in words else torch.float32
    model = make(wrong)
    batch = torch.randn(3, 4, dtype=dtype)
    check = check_adjoint(model, (batch, torch.randn(3, 4)) if sites == ["Product:input.args.1"] else batch)
    assert bool(check) is not wrong
    assert sorted(faults(check)) == (sites if wrong else [])
    assert all(words in reason for reason in faults(check).values())


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_detach_in_the_middle_is_seen_though_forward_mode_misses_it(is_cut: bool) -> None:
    check = check_adjoint(TwoWays(is_cut=is_cut), BATCH)
    assert bool(check) is not is_cut
    if is_cut:
        (row,) = check.faults
        assert str(row.site) == "self:input.x"
        assert "a detach() cuts off" in row.reason
        assert row.method == "finite differences"


def test_a_detach_that_cuts_everything() -> None:
    class Cut(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.detach() * 2

    (row,) = check_adjoint(Cut(), BATCH).faults
    assert "no gradient arrives" in row.reason
    assert row.backward == 0


def test_a_backward_that_raises() -> None:
    class Overwriting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = x.exp()
            doubled = result * result
            result.zero_()
            return doubled

    (row,) = check_adjoint(Overwriting(), BATCH).faults
    assert "its backward raises RuntimeError: one of the variables needed" in row.reason


def test_layers_that_overwrite_what_another_has_saved() -> None:
    class Doubly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Sigmoid(), nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    (row,) = check_adjoint(Doubly(), BATCH).faults
    assert str(row.site) == "self:input.x"
    assert "modified by an inplace operation" in row.reason


def test_several_probes_tell_the_same() -> None:
    torch.manual_seed(1)
    layer = linear("missing factor")
    check = check_adjoint(layer, BATCH, probes=4)
    assert list(faults(check)) == ["self:weight"]
    assert len(check) == 3


def test_a_fault_of_one_call_of_a_shared_module() -> None:
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.is_large = bool(x.abs().max() > 100)
        return x * 2

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Applied(make_function(forward, lambda ctx, given: given * (3 if ctx.is_large else 2)).apply)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cell(self.cell(x) * 100)

    check = check_adjoint(Twice(), torch.ones(2, 3))
    assert [str(row.site) for row in check.faults] == ["cell#2:input.x"]
    assert check.faults[0].backward / check.faults[0].forward == pytest.approx(1.5)


class Unsteady(torch.autograd.Function):
    """3 x, whose backward adds noise of a size, or adds up in another order each time."""

    size = 0.0
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Unsteady.calls += 1
        rounded = gradient * (1 + (Unsteady.calls % 2) * torch.finfo(gradient.dtype).eps)
        return 3 * rounded + Unsteady.size * torch.randn_like(gradient)


@pytest.mark.parametrize("size", [1e-2, 1e-5, 1e-9, 1e-12])
def test_a_backward_that_draws_is_told_from_one_that_is_wrong_however_small_the_noise(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unsteady, "size", size)
    x = BATCH.double().requires_grad_()
    output = Unsteady.apply(x)
    first, second = (torch.autograd.grad(output.sum(), x, retain_graph=True)[0] for _ in range(2))
    check = check_adjoint(nn.Sequential(nn.Linear(6, 6), Applied(Unsteady.apply)), BATCH)
    (row,) = check.faults
    assert (row.site.path, row.verdict) == ("1", Verdict.RANDOM)
    assert "gives another gradient when it is run again" in row.reason
    said = float(row.reason.partition("apart by ")[2].split()[0])
    norm = torch.linalg.vector_norm
    assert said == pytest.approx(float(norm(second - first) / norm(first)), rel=0.5)


def test_a_backward_that_differs_by_rounding_alone_is_ok_and_so_is_one_with_a_hook_that_draws() -> None:
    assert Unsteady.size == 0.0
    assert {row.verdict for row in check_adjoint(Applied(Unsteady.apply), BATCH)} == {Verdict.OK}
    hooked = nn.Linear(6, 6)
    hooked.weight.register_hook(lambda gradient: gradient + 1e-9 * torch.randn_like(gradient))
    assert Verdict.RANDOM not in {row.verdict for row in check_adjoint(hooked, BATCH)}
