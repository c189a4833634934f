"""What can be asked for, what is printed, and what is refused."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.errors import AdjointError, AttachError, NoSuchSiteError
from retrograd.core.limits import LIMITS
from retrograd.tools.adjoint.adjoint_check import Verdict
from retrograd.tools.adjoint.check import Progress, check_adjoint
from tests.tools.adjoint.planted import LinearFunction, linear

BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def sites(model: nn.Module, selected: Any) -> set[str]:
    return {str(row.site) for row in check_adjoint(model, BATCH, sites=selected)}


@pytest.mark.parametrize(
    ("selected", "found"),
    [
        ("stem", {"stem:input.input", "stem:weight", "stem:bias"}),
        ("stem:weight", {"stem:weight"}),
        ("stem:weight.grad", {"stem:weight"}),
        ("stem:output.grad", {"stem:input.input", "stem:weight", "stem:bias"}),
        ("blocks.*:input.*", {"blocks.0:input.input", "blocks.0.0:input.input", "blocks.0.1:input.input",
                              "blocks.1:input.input", "blocks.1.0:input.input", "blocks.1.1:input.input"}),
        (nn.Tanh, {"blocks.0.1:input.input", "blocks.1.1:input.input"}),
        (["stem:bias", "blocks.1.1"], {"stem:bias", "blocks.1.1:input.input"}),
        (["*", "!blocks.*", "!self"], {"stem:input.input", "stem:weight", "stem:bias"}),
        (["stem", "!stem:weight"], {"stem:input.input", "stem:bias"}),
        (lambda candidate: candidate.site.path == "stem" and candidate.site.slot == "bias", {"stem:bias"}),
    ],
)  # fmt: skip
def test_selection(selected: Any, found: set[str]) -> None:
    assert sites(Net(), selected) == found


def test_calls_are_counted() -> None:
    cell = nn.Linear(6, 6)

    def run(x: Tensor) -> Tensor:
        return cell(cell(x))

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor) -> Tensor:
            return run(x)

    with pytest.raises(AdjointError, match="Nothing was compared"):  # not the copy's own module is called
        check_adjoint(Twice(), BATCH, sites="cell")
    assert sites(nn.Sequential(cell, cell), "0") == {
        f"0{call}:{slot}" for call in ("", "#2") for slot in ("input.input", "weight", "bias")
    }


def test_a_function() -> None:
    def weigh(x: Tensor, weight: Tensor, *, power: int = 2) -> Tensor:
        return (x @ weight) ** power

    check = check_adjoint(weigh, (BATCH, torch.randn(6, 2)))
    assert {str(row.site) for row in check} == {"weigh:input.x", "weigh:input.weight"}
    assert {row.verdict for row in check} == {Verdict.OK}
    (row,) = check_adjoint(torch.tanh, BATCH)
    assert row.verdict is Verdict.OK
    (row,) = check_adjoint(lambda x: x.exp(), BATCH)
    assert row.site.path == "lambda"


def test_apply_of_a_function_knows_the_names_of_its_arguments() -> None:
    class WithSetup(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, factor: float) -> Tensor:
            return x * factor

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.factor = inputs[1]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient * ctx.factor, None

    (row,) = check_adjoint(WithSetup.apply, (BATCH, 2.5))
    assert str(row.site) == "WithSetup:input.x"

    class Right(LinearFunction):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return tuple(LinearFunction.right(ctx, gradient))

    check = check_adjoint(Right.apply, (BATCH, torch.randn(4, 6), torch.randn(4)))
    assert {str(row.site) for row in check} == {"Right:input.x", "Right:input.weight", "Right:input.bias"}
    assert check


def test_arguments_by_name() -> None:
    model = nn.Bilinear(6, 6, 2)
    assert {str(row.site) for row in check_adjoint(model, {"input1": BATCH, "input2": BATCH * 2})} == {
        "self:input.input1", "self:input.input2", "self:weight", "self:bias",
    }  # fmt: skip


def test_a_frozen_parameter_is_left_out() -> None:
    model = nn.Linear(6, 2)
    model.bias.requires_grad_(False)
    assert sites(model, "*") == {"self:input.input", "self:weight"}


def test_computing_in_the_models_own_dtype() -> None:
    check = check_adjoint(nn.Linear(6, 2), BATCH, in_double=False)
    assert check
    assert {row.precision for row in check} == {"float32"}
    assert not check_adjoint(linear("missing factor"), BATCH, in_double=False)


def test_the_table() -> None:
    torch.manual_seed(1)
    check = check_adjoint(nn.Sequential(nn.Linear(6, 6), linear("missing factor"), nn.Tanh()), BATCH)
    heading, worst, *_ = str(check).splitlines()
    assert heading.split("  ")[0] == "site"
    assert worst.startswith("1:weight")
    assert f"{check.rows[0].forward:+.6e}" in worst
    assert f"{check.rows[0].backward:+.6e}" in worst
    assert str(check).splitlines()[-1] == (
        "1 (Layer) is at fault: its gradient of 1:weight is wrong; "
        "it is 0.5 times the right gradient: a constant factor."
    )
    assert str(check_adjoint(nn.Tanh(), BATCH)).splitlines()[-1] == "1 of 1 comparisons agree; no backward is wrong."


def test_a_long_table_is_cut_where_all_is_well() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(15)))
    check = check_adjoint(model, BATCH)
    assert len(check) == 46
    assert "... and 16 more that are ok" in str(check)
    assert len(str(check).splitlines()) == 34


def test_rows_come_worst_first() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), linear("flipped sign"))
    model[0].register_forward_hook(lambda module, args, output: output.register_hook(lambda g: g * 2) and None)
    order = [row.verdict for row in check_adjoint(model, BATCH)]
    assert order == sorted(order, key=list(Verdict).index)
    assert order[0] is Verdict.WRONG
    assert Verdict.REWRITTEN in order


@pytest.mark.parametrize(
    ("model", "batch", "words"),
    [
        (nn.Embedding(5, 3).requires_grad_(False), torch.tensor([1, 2]), "Nothing was compared"),
        (nn.LazyLinear(3), BATCH, "parameters without a shape"),
    ],
)
def test_what_cannot_be_checked(model: nn.Module, batch: Tensor, words: str) -> None:
    with pytest.raises(AdjointError, match=words):
        check_adjoint(model, batch)


def test_a_model_that_cannot_be_copied() -> None:
    model = nn.Linear(6, 2)
    model.lock = threading.Lock()
    with pytest.raises(AdjointError, match=r"cannot be copied: TypeError: cannot pickle '_thread.lock'"):
        check_adjoint(model, BATCH)


def test_no_model() -> None:
    with pytest.raises(AttachError):
        check_adjoint("model", BATCH)
    with pytest.raises(AdjointError):
        check_adjoint(nn.Tanh(), BATCH, probes=0)


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(NoSuchSiteError, match="stem"):
        check_adjoint(Net(), BATCH, sites="sten")


def test_a_compiled_model_is_checked_as_it_is_written() -> None:
    torch.manual_seed(1)
    model = torch.compile(nn.Sequential(nn.Linear(6, 6), linear("missing factor")), backend="eager")
    (row,) = check_adjoint(model, BATCH).faults
    assert str(row.site) == "1:weight"


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    progress = Progress(3, None)
    progress.step("a")
    assert stream.getvalue() == ""
    monkeypatch.setattr(LIMITS, "quiet_check_seconds", -1.0)
    progress = Progress(3, True)
    progress.step("blocks.0")
    progress.step("blocks.1")
    assert "module 2 of 3, blocks.1" in stream.getvalue()
    progress.end()
    assert stream.getvalue().endswith("\r")
