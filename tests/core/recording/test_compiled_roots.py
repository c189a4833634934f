"""What a compiled module returns and itself uses further: its gradients, in the bits of eager code."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from tests.compiling import count_compiled
from tests.core.recording.test_compile import recorded_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]

Compile = Callable[[nn.Module], Any]


class Scored(nn.Module):
    """The loss is computed inside, and only that is used outside."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = self.body(x).tanh()
        logits = self.head(hidden)
        return logits.square().mean(), {"logits": logits, "hidden": hidden}


class Flat(Scored):
    def forward(self, x: Tensor) -> Any:
        loss, found = super().forward(x)
        return loss, found["hidden"], found["logits"] * 2


@dataclass
class Output:
    first: Tensor
    rest: Any


class Mixed(nn.Module):
    """An argument, what is used within, what is used outside, what nobody uses, a number, one tensor twice, a view."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(this, x: Tensor) -> Output:  # noqa: N805
        def call(part: str, value: Any) -> Any:
            return getattr(this, part)(value)

        one = call("one", x)
        two = call("two", one)
        unused = call("three", x)
        return Output(two, {"x": x, "one": [one, one], "unused": unused, "n": 3, "view": one[:, :2]})


class Broken(nn.Module):
    """A graph that breaks: what is used on both sides of the break, and behind it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        one = self.one(x)
        torch._dynamo.graph_break()
        two = self.two(one)
        return self.three(two), two, one


class Written(nn.Module):
    """An output that is overwritten after it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one = self.one(x)
        self.act(one)
        return self.two(one), one


class Outer(nn.Module):
    """A part that is called twice, and whose outputs are used in different ways."""

    def __init__(self, part: nn.Module, *, saved: bool = False) -> None:
        super().__init__()
        self.first, self.part, self.saved = nn.Linear(6, 6), part, saved

    def forward(self, x: Tensor) -> Tensor:
        first, rest = self.call(self.first(x)), self.call(x)
        total = x.new_zeros(())
        for number, value in enumerate([*tensors_in(first), *tensors_in(rest)]):
            total = total + (number + 1) * value.square().mean() if number % 3 else total
        return total

    def call(self, x: Tensor) -> Any:
        return checkpoint(self.part, x, use_reentrant=True) if self.saved else self.part(x)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Output):
        return tensors_in([value.first, value.rest["x"], value.rest["one"]])
    values = value.values() if isinstance(value, dict) else value
    return [tensor for each in values for tensor in tensors_in(each)]


def as_parts(net: nn.Module) -> Any:
    net.part.compile(backend="aot_eager")  # type: ignore[union-attr, operator]
    return net


def as_wrapped_parts(net: nn.Module) -> Any:
    net.part = torch.compile(net.part, backend="aot_eager")  # type: ignore[assignment]
    return net


def as_forward(net: nn.Module) -> Any:
    net.part.forward = torch.compile(net.part.forward, backend="aot_eager")  # type: ignore[method-assign, union-attr]
    return net


def train(make: Callable[[], nn.Module], compile_: Compile, *, record: bool = True) -> tuple[Any, Any, dict[str, Any]]:
    """Gradients and losses, all that was recorded, and what was compiled."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(3)
    net = make()
    call = compile_(net)
    update = torch.optim.SGD(net.parameters(), lr=0.1)
    losses, gradients = [], []
    with rg.record(call, sites="*:output*") if record else nullcontext() as recording:
        for _ in range(2):
            loss = call(torch.randn(4, 6, requires_grad=True))
            loss = loss if isinstance(loss, Tensor) else sum(each.mean() for each in tensors_in(loss)[:2])
            loss.backward()
            losses.append(loss.item())
            gradients += [each.grad.tolist() for each in net.parameters() if each.grad is not None]
            update.step()
            update.zero_grad()
        with torch.no_grad():
            call(torch.randn(4, 6))
    return (losses, gradients), recording and recorded_rows(recording.history), count_compiled()


NETS = [Scored, Mixed, Broken, Written]


WAYS = [(as_parts, make) for make in NETS] + [(as_wrapped_parts, Mixed), (as_forward, Scored)]


@pytest.mark.parametrize(("compile_", "make"), WAYS)
def test_every_output_of_a_part_has_the_rows_of_eager_code(make: Any, compile_: Compile) -> None:
    _check(lambda: Outer(make()), compile_)


def test_so_has_every_output_of_a_model() -> None:
    _check(Scored, lambda net: torch.compile(net, backend="aot_eager"))


def test_under_a_reentrant_checkpoint() -> None:
    """A graph is made in the backward pass, under a hook on all modules, so there may be one more."""
    _check(lambda: Outer(Flat(), saved=True), as_parts, counts=False)


def _check(make: Callable[[], nn.Module], compile_: Compile, *, counts: bool = True) -> None:
    eager, expected, _ = train(make, lambda net: net)
    seen, found, counted = train(make, compile_)
    bare, _, counted_bare = train(make, compile_, record=False)
    assert seen == bare
    assert seen[0] == eager[0]
    assert counted == counted_bare or not counts
    zeros = [site for site in found if site not in expected]  # of what is made for an output that nobody uses
    assert not [site for site in zeros if site.startswith(("self", "part:", "part#")) or found[site][3] != [0.0, 0.0]]
    assert {site: rows for site, rows in found.items() if site not in zeros} == expected


def test_like_blocks_share_a_graph_and_nothing_is_compiled_anew() -> None:
    blocks = nn.ModuleList(Scored() for _ in range(4))
    for block in blocks:
        block.compile(backend="aot_eager")

    def run() -> None:
        loss = torch.zeros(())
        for block in blocks:
            loss = loss + block(torch.ones(2, 6))[0]
        loss.backward()

    model = nn.ModuleDict({"blocks": blocks})
    with rg.record(model) as recording:
        run()
    assert counters["stats"]["unique_graphs"] == 1
    assert {f"blocks.{number}:output.1.logits.grad" for number in range(4)} <= set(recording.history.sites)
    first = dict(counters["stats"])
    run()
    with rg.record(model, sites="blocks.1:output*", schedule=2) as recording:
        run()
        run()
    assert dict(counters["stats"]) == first
    assert "blocks.1:output.1.logits.grad" in recording.history.sites


def test_a_forward_that_is_called_by_itself_is_no_call() -> None:
    model = Scored()
    model.forward = torch.compile(model.forward, backend="aot_eager")  # type: ignore[method-assign]
    with rg.record(model, sites="self:output*") as recording:
        model(torch.ones(2, 6))[0].backward()
        model.forward(torch.ones(2, 6))[0].backward()
    assert "self#2:output.0" not in recording.history.sites
    assert recording.history["self:output.1.logits"].count.tolist() == [6]


def test_a_hook_of_the_program_that_changes_what_is_returned() -> None:
    """What compiled code shows is not what the module returns then."""

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        loss, found = output
        return loss, {name: 2 * tensor for name, tensor in found.items()}

    def run(compile_: Compile) -> Any:
        torch.manual_seed(3)
        model = Scored()
        model.register_forward_hook(double)
        call = compile_(model)
        with rg.record(model, sites="self:output*") as recording:
            loss, found = call(torch.ones(2, 6))
            (loss + found["logits"].sum()).backward()
        return recorded_rows(recording.history)

    assert run(lambda net: torch.compile(net, backend="aot_eager")) == run(lambda net: net)


class Raising(Scored):
    fails = False

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return self.check(found)

    @torch.compiler.disable
    def check(self, found: Any) -> Any:
        if self.fails:
            raise ArithmeticError
        return found


def test_after_a_call_that_raises_the_next_one_is_seen() -> None:
    model = Raising()
    compiled = torch.compile(model, backend="aot_eager")
    with rg.record(model, sites="self:output*") as recording:
        compiled(torch.ones(2, 6))[0].backward()
        model.fails = True
        with pytest.raises(ArithmeticError):
            compiled(torch.ones(2, 6))
        model.fails = False
        with torch.compiler.set_stance("force_eager"):
            compiled(torch.ones(2, 6))[0].backward()
    assert not [event for event in recording.history.events if event.kind == "fault"]
    assert recording.history["self:output.0"].count.sum() >= 2


def test_threads_that_call_the_same_module() -> None:
    model = Scored()
    compiled = torch.compile(model, backend="aot_eager")
    with rg.record(model, sites="self:output*") as recording:
        compiled(torch.ones(2, 6))[0].backward()
        threads = [threading.Thread(target=lambda: compiled(torch.ones(2, 6))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not [event for event in recording.history.events if event.kind == "fault"]


class Attached(nn.Module):
    """One of its parts is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.two(self.one(x))
        return found


def test_only_what_compiled_code_lacks_is_told_of() -> None:
    model = nn.Sequential(Attached())
    model[0].compile(backend="aot_eager")

    def record(sites: str) -> None:
        with rg.record(model, sites=sites):
            model(torch.ones(2, 6)).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error", rg.RetrogradWarning)
        record("0.one:output*")
        record("0.one:output*")
        record("0:output*")
    with pytest.warns(rg.RetrogradWarning, match=r"which runs 0\.two, 0\.unused\."):
        record("*:output*")  # what else is called there is not known
    with warnings.catch_warnings():
        warnings.simplefilter("error", rg.RetrogradWarning)
        torch.compiler.reset()
        record("*:output*")
        record("*:output*")


def test_two_wrappers_of_one_model_each_have_their_own_boundary() -> None:
    def train(compiles: bool) -> list[dict[str, list[float]]]:
        torch.manual_seed(0)
        net = Flat()
        first, second = [torch.compile(net, backend="aot_eager") if compiles else net for _ in range(2)]
        sites = ["self:outputs", "self:outputs.grad"]
        histories = []
        for scale in (1.0, 2.0):  # in eager code one after the other, for there the two are one
            with rg.record(first, sites=sites) as one, rg.record(second, sites=sites) as two:
                call, recorder = (first, one) if scale == 1 else (second, two)
                loss, hidden, _ = call(torch.full((2, 6), scale))
                (loss + hidden.sum()).backward()
            histories.append({str(site): recorder.history[site].rms.tolist() for site in recorder.history})
        return histories

    for found, expected in zip(train(True), train(False), strict=True):
        assert found.keys() == expected.keys()
        for site, rms in expected.items():
            assert found[site] == pytest.approx(rms), site


def test_what_lies_in_code_that_was_compiled_before_is_not_said_to_be_uncalled() -> None:
    """The wrapper is held outside, and the module in it is recorded: hooks on its parts come too late."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.unused = nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x).relu()

    def list_reasons(model: nn.Module, call: Any) -> dict[str, str]:
        with rg.record(model) as recording:
            call(torch.ones(2, 6)).sum().backward()
        return {each["site"]: each["reason"] for each in recording.history.manifest["not_recorded"]}

    model = Net()
    assert "never called" in list_reasons(model, model)["unused:output"]
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.ones(2, 6))
    reasons = list_reasons(model, compiled)
    assert "compiled before the recording" in reasons["one:output"]
    torch.compiler.reset()
    assert "one:output" not in list_reasons(model, compiled)
