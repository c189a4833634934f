"""Why a gradient is missing: against plain autograd, and the lines of this file."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from retrograd.core.errors import GraphError, RetrogradWarning
from retrograd.explaining.gradients.explain import explain_gradients
from retrograd.explaining.gradients.reasons import FINE

Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """An encoder, whose result goes through what is tried, and a head."""

    def __init__(self, between: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self, x))


def fine(net: Net, x: Tensor) -> Tensor:
    return net.encoder(x).tanh()


def detach(net: Net, x: Tensor) -> Tensor:
    return net.encoder(x).detach()  # here


def data(net: Net, x: Tensor) -> Tensor:
    return net.encoder(x).data * 2  # here


def item(net: Net, x: Tensor) -> Tensor:
    total = net.encoder(x).sum()
    return torch.ones(5, 4) * total.item()  # here


def to_list(net: Net, x: Tensor) -> Tensor:
    rows = net.encoder(x).tolist()  # here
    return torch.tensor(rows)


def to_numpy(net: Net, x: Tensor) -> Tensor:
    values = net.encoder(x).detach().numpy()  # here
    return torch.from_numpy(np.tanh(values))


def new_tensor(net: Net, x: Tensor) -> Tensor:
    return torch.tensor(net.encoder(x))  # here


def argmax(net: Net, x: Tensor) -> Tensor:
    best = net.encoder(x).argmax(-1)  # here
    return nn.functional.one_hot(best, 4).float()


def integer(net: Net, x: Tensor) -> Tensor:
    return (net.encoder(x) * 10).long().float()  # here


def compared(net: Net, x: Tensor) -> Tensor:
    return (net.encoder(x) > 0).float()  # here


def no_grad(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():  # here
        return net.encoder(x)


@torch.no_grad()
def encode(net: Net, x: Tensor) -> Tensor:
    return net.encoder(x)


def no_grad_by_decorator(net: Net, x: Tensor) -> Tensor:
    return encode(net, x)  # here


def inference(net: Net, x: Tensor) -> Tensor:
    with torch.inference_mode():
        features = net.encoder(x)  # here
    return features.clone()


def beside_the_loss(net: Net, x: Tensor) -> Tensor:
    net.encoder(x)
    return torch.ones(5, 4)


def uncalled(net: Net, x: Tensor) -> Tensor:
    return torch.ones(5, 4)


def times_zero(net: Net, x: Tensor) -> Tensor:
    return net.encoder(x) * 0  # here


def dead(net: Net, x: Tensor) -> Tensor:
    return torch.relu(net.encoder(x) - 100)  # here


def rounded(net: Net, x: Tensor) -> Tensor:
    return net.encoder(x).round()  # here


def saturated(net: Net, x: Tensor) -> Tensor:
    return torch.sigmoid(net.encoder(x) + 1000)  # here


def hooked(net: Net, x: Tensor) -> Tensor:
    features = net.encoder(x)
    features.register_hook(torch.zeros_like)
    return features


class Ungiving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> None:
        return None


def gives_none(net: Net, x: Tensor) -> Tensor:
    return Ungiving.apply(net.encoder(x))  # here


CASES: dict[Forward, tuple[str, str | None]] = {
    fine: ("has one", "some"),
    detach: ("cut", None),
    data: ("cut", None),
    item: ("cut", None),
    to_list: ("cut", None),
    to_numpy: ("cut", None),
    new_tensor: ("cut", None),
    argmax: ("cut", None),
    integer: ("cut", None),
    compared: ("cut", None),
    no_grad: ("no_grad", None),
    no_grad_by_decorator: ("no_grad", None),
    inference: ("inference_mode", None),
    beside_the_loss: ("not in the loss", None),
    uncalled: ("never called", None),
    times_zero: ("zero factor", "zero"),
    dead: ("dead units", "zero"),
    rounded: ("step function", "zero"),
    saturated: ("saturated", "zero"),
    hooked: ("hook", "zero"),
    gives_none: ("no derivative", None),
}


def line_here(case: Forward) -> str | None:
    lines, first = inspect.getsourcelines(case)
    found = [first + number for number, text in enumerate(lines) if "# here" in text]
    return f"{__file__}:{found[0]}" if found else None


def state(parameter: Tensor) -> str:
    if parameter.grad is None:
        return "None"
    return "some" if bool((parameter.grad != 0).any()) else "zero"


def step(net: nn.Module) -> Tensor:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 3)).astype("float32"))
    loss: Tensor = net(x).square().sum()
    loss.backward()
    return loss


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("case", CASES)
def test_the_reason_and_its_line(case: Forward) -> None:
    plain, net = Net(case), Net(case)
    expected = step(plain)
    with explain_gradients(net) as why:
        loss = step(net)
    assert torch.equal(loss, expected)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
    word, grad = CASES[case]
    for name in ("encoder:weight", "encoder:bias"):
        reason = why[name]
        assert (reason.why, reason.grad) == (word, grad or "None"), str(reason)
        assert reason.grad == state(net.encoder.weight)
        line = line_here(case)
        assert line is None or reason.line == line
        assert reason.is_fine or reason.repair
    assert why["head:bias"].why == "has one"
    assert bool(why.findings) == (word not in FINE)


def test_one_cause_is_one_finding() -> None:
    net = Net(detach)
    with explain_gradients(net) as why:
        step(net)
    (finding,) = why.findings
    assert finding.line == line_here(detach)
    assert "encoder:weight and encoder:bias: .grad is None" in finding.message
    assert "encoder:weight  None  cut" in str(why)


def test_frozen_is_no_finding() -> None:
    net = Net(fine)
    net.encoder.requires_grad_(False)
    with explain_gradients(net) as why:
        step(net)
    assert why["encoder:weight"].why == "frozen"
    assert not why.findings
    assert not why.missing


def test_the_line_that_froze_it() -> None:
    net = Net(fine)
    with explain_gradients(net) as why:
        net.encoder.weight.requires_grad_(False)
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
        step(net)
    assert why["encoder:weight"].line == f"{__file__}:{line}"


@pytest.mark.parametrize("to_none", [True, False])
def test_cleared_by_zero_grad(to_none: bool) -> None:
    net = Net(fine)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with explain_gradients(net) as why:
        step(net)
        optimizer.zero_grad(set_to_none=to_none)
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert {each.why for each in why.values()} == {"cleared"}
    assert {each.line for each in why.values()} == {f"{__file__}:{line}"}


def test_a_whole_step_with_an_optimizer_is_seen() -> None:
    net = Net(detach)
    optimizer = torch.optim.Adam(net.parameters())
    with explain_gradients(net) as why:
        for _ in range(2):
            optimizer.zero_grad()
            step(net)
            optimizer.step()
    assert why["encoder:weight"].line == line_here(detach)
    assert why["head:weight"].why == "has one"


def test_grad_and_inputs() -> None:
    net = Net(fine)
    with explain_gradients(net) as why:
        torch.autograd.grad(net(torch.randn(5, 3)).sum(), list(net.parameters()))
    assert {each.why for each in why.values()} == {"returned"}
    with explain_gradients(net) as why:
        net(torch.randn(5, 3)).sum().backward(inputs=list(net.head.parameters()))
    assert [each.why for each in why.values()] == ["not asked for"] * 2 + ["has one"] * 2


def test_a_double_backward() -> None:
    net = Net(fine)
    with explain_gradients(net) as why:
        x = torch.randn(5, 3, requires_grad=True)
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    assert why["head:weight"].why == why["encoder:weight"].why == "has one"
    assert why["head:bias"].grad == "None"
    assert why["head:bias"].why not in FINE


def test_a_loss_without_a_graph_says_where_it_was_lost() -> None:
    net = Net(fine)
    with pytest.raises(RuntimeError, match="does not require grad") as raised, explain_gradients(net) as why:
        loss = (net(torch.randn(5, 3)).argmax(-1) == 1).float().mean()
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
        loss.requires_grad_(False).backward()
    assert why.loss is not None
    assert why.loss.line == f"{__file__}:{line}"
    assert f"{__file__}:{line}" in raised.value.__notes__[0]
    (finding,) = why.findings
    assert finding.severity == "critical"


def test_a_graph_that_is_used_again() -> None:
    net = Net(fine)
    with pytest.raises(RuntimeError, match="second time") as raised, explain_gradients(net):
        features = net(torch.randn(5, 3))
        features.exp().sum().backward()
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
        features.exp().sum().backward()
    assert "AddmmBackward0" in raised.value.__notes__[0]
    assert f"{__file__}:{line}" in raised.value.__notes__[0]


def test_no_backward() -> None:
    net = Net(fine)
    with explain_gradients(net) as why:
        net(torch.randn(5, 3))
    assert {each.why for each in why.values()} == {"no backward"}


def test_a_copy_is_called() -> None:
    net = Net(fine)
    other = copy.deepcopy(net)
    with explain_gradients(net) as why:
        step(other)
    assert {each.why for each in why.values()} == {"another copy"}
    assert {each.why for each in explain_gradients(net, other(torch.randn(5, 3)).sum()).values()} == {"another copy"}


def test_optimizers() -> None:
    net = Net(fine)
    some = torch.optim.SGD(net.head.parameters(), lr=0.1)
    with explain_gradients(net, optimizer=some) as why:
        step(net)
    assert [each.why for each in why.values()] == ["not optimized"] * 2 + ["has one"] * 2
    before = torch.optim.SGD(net.parameters(), lr=0.1)
    net.head = nn.Linear(4, 2)
    why = explain_gradients(net, net(torch.randn(5, 3)).sum(), optimizer=[before])
    assert [each.why for each in why.values()][:4] == ["has one", "has one", "not optimized", "not optimized"]
    assert [each.why for each in why.values()][4:] == ["another copy", "another copy"]


def test_from_the_graph_alone() -> None:
    net = Net(detach)
    loss = net(torch.randn(5, 3)).sum()
    assert [each.why for each in explain_gradients(net, loss).values()] == ["unknown"] * 2 + ["not yet"] * 2
    loss.backward()
    why = explain_gradients(net, loss)
    assert [each.why for each in why.values()] == ["unknown"] * 2 + ["has one"] * 2
    assert "with rg.explain_gradients(model) as why:" in str(why)
    net.zero_grad()
    assert [each.why for each in explain_gradients(net, loss).values()] == ["unknown"] * 2 + ["cleared"] * 2
    without = explain_gradients(net, loss.detach())
    assert without.loss is not None
    assert without.loss.why == "no graph"


def test_other_tensors() -> None:
    net = Net(fine)
    x = torch.randn(5, 3, requires_grad=True)
    moved = x.to(torch.float64)
    why = explain_gradients(net, moved.sum(), tensors={"x": x, "moved": moved})
    assert why["x"].why == "not yet"
    assert why["moved"].why == "not a leaf"
    assert "ToCopy" in why["moved"].message
    with explain_gradients(net) as why:
        hidden = net.encoder(x)
        kept = hidden * 2
        kept.retain_grad()
        net.head(kept).sum().backward()
    assert why.of(hidden, "hidden").why == "not a leaf"
    assert why.of(kept, "kept").why == "has one"
    assert why.of(net.head.weight) is why["head:weight"]


def test_checkpoints_are_seen_through() -> None:
    net = Net(fine)
    for reentrant in (True, False):
        net.zero_grad()
        with explain_gradients(net) as why:
            x = torch.randn(5, 3, requires_grad=True)
            torch.utils.checkpoint.checkpoint(net, x, use_reentrant=reentrant).sum().backward()
        assert {each.why for each in why.values()} == {"has one"}, str(why)


def checkpointed(net: Net, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(net.encoder, x, use_reentrant=True)  # here


def nested(net: Net, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(net.encoder, x, use_reentrant=True)

    return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=True)  # here


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("case", [checkpointed, nested])
def test_a_reentrant_checkpoint_to_which_no_pass_comes_and_what_helps(case: Forward) -> None:
    net = Net(case)
    with explain_gradients(net) as why:
        step(net)
    assert net.encoder.weight.grad is None
    assert (why["encoder:weight"].why, why["encoder:weight"].line) == ("checkpoint", line_here(case))
    assert why["head:weight"].why == "has one"
    x = torch.randn(5, 3, requires_grad=True)  # the remedy
    with explain_gradients(net) as why:
        net(x).sum().backward()
    assert net.encoder.weight.grad is not None
    assert {each.why for each in why.values()} == {"has one"}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_loss_that_is_made_in_such_a_checkpoint_alone() -> None:
    net = Net(fine)
    with explain_gradients(net) as why, pytest.raises(RuntimeError, match="does not require grad"):
        torch.utils.checkpoint.checkpoint(net, torch.randn(5, 3), use_reentrant=True).sum().backward()
    assert why.loss is not None
    assert why.loss.why == "checkpoint"


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpoint_in_no_grad_is_not_to_blame() -> None:
    def blind(net: Net, x: Tensor) -> Tensor:
        torch.utils.checkpoint.checkpoint(net.head, torch.randn(2, 4, requires_grad=True), use_reentrant=True)
        with torch.no_grad():
            return checkpointed(net, x)

    net = Net(blind)
    with explain_gradients(net) as why:
        step(net)
    assert net.encoder.weight.grad is None
    assert "checkpoint" not in why["encoder:weight"].why


def test_nothing_is_kept_alive() -> None:
    net = Net(fine)
    graph = weakref.ref(net.between)
    with explain_gradients(net) as why:
        loss = step(net)
    held = weakref.ref(loss)
    del loss
    gc.collect()
    assert held() is None
    assert graph() is not None
    assert len(why) == 4


def test_transforms_are_left_alone() -> None:
    net = Net(fine)
    x = torch.randn(5, 3)
    with explain_gradients(net) as why:
        rows = torch.func.vmap(torch.func.grad(lambda row: net(row).sum()))(x)
        step(net)
    assert rows.shape == x.shape
    assert {each.why for each in why.values()} == {"has one"}


def test_a_fault_of_ours_does_not_stop_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ValueError("ours")

    monkeypatch.setattr("retrograd.core.hooks.flow.FlowNotes.after", fail)
    net, plain = Net(fine), Net(fine)
    with pytest.warns(RetrogradWarning, match="ours"), explain_gradients(net):
        loss = step(net)
    assert torch.equal(loss, step(plain))


def test_what_is_no_model() -> None:
    with pytest.raises(GraphError, match=r"torch\.nn\.Module"):
        explain_gradients([nn.Linear(1, 1)])  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="names a list"):
        explain_gradients(nn.Linear(1, 1), tensors={"x": [1]})  # type: ignore[dict-item]
