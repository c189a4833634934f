"""Operations between a forward and its backward pass: which, where, and that noting them changes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from retrograd.core.history.facts import GraphSize, Operation, Operations, read_facts
from retrograd.core.history.history import History
from retrograd.core.recording import facts
from retrograd.core.recording.recorder import Recorder
from retrograd.explaining.facts import operations
from retrograd.explaining.facts.nonfinite_look import NonFiniteLook
from retrograd.explaining.facts.operation_notes import OperationNotes
from retrograd.explaining.facts.operations import ForwardOperations
from retrograd.explaining.facts.units import UnitLooks
from tests.explaining.facts.looking import facts_while, line_of


@pytest.fixture(autouse=True)
def look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "is_look", lambda recorded: True)
    monkeypatch.setattr(operations, "ALWAYS", 1 << 30)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        h = Square.apply(h)
        shift = h.detach().sum(0)
        return self.head(h - shift)


def train_net(net: nn.Module, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        out = net(torch.ones(5, 4))
        probabilities = out.softmax(-1)
        loss = F.nll_loss(probabilities.log(), torch.tensor([0, 1, 2, 0, 1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def operations_of(train: Callable[[], None], model: Any) -> list[tuple[Operations, list[Operation]]]:
    return [(fact, fact.operations()) for fact in facts_while(train, model, Operations)]


def test_each_operation_has_its_line_its_module_and_what_made_its_operands() -> None:
    net = Net()
    [(fact, listed)] = operations_of(lambda: train_net(net, 3), net)
    names = [each.name for each in listed]
    assert names == [
        "linear", "relu", "mul", "Square", "detach", "sum", "sub", "linear", "softmax", "log", "tensor", "nll_loss",
    ]  # fmt: skip
    by_name = dict(zip(names, listed, strict=True))
    assert by_name["relu"].module == "body.1"
    assert by_name["relu"].line == line_of("self.body(x)", Net)
    assert by_name["relu"].operands == (names.index("linear"),)
    assert by_name["sub"].operands == (names.index("Square"), names.index("sum"))
    assert by_name["Square"].line == line_of("Square.apply(h)", Net)
    assert by_name["mul"].line == line_of("return x * x", Square)
    assert by_name["mul"].mode == "function"
    assert by_name["softmax"].line == line_of("out.softmax(-1)", train_net)
    assert by_name["softmax"].module == ""
    assert by_name["softmax"].arguments == "dim=-1"
    assert by_name["softmax"].node == "SoftmaxBackward0"
    assert by_name["softmax"].takes == by_name["softmax"].makes == ("float32[5, 3]",)
    assert "reduction=mean" in by_name["nll_loss"].arguments
    assert fact.outputs == (7,)
    assert names[fact.loss] == "nll_loss"


class SquareFunction(rg.Function):
    def forward(self, ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    def backward(self, ctx: Any, grad: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": 2 * grad * ctx.saved_tensors[0]}


class NetOfFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.square = SquareFunction()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.square(x.exp()).sum()


def test_a_function_as_an_object_is_told_from_what_it_does() -> None:
    net = NetOfFunctions()
    [(_, listed)] = operations_of(lambda: net(torch.ones(3, requires_grad=True)).backward(), net)
    assert [each.name for each in listed] == ["exp", "mul", "SquareFunction", "sum"]
    _, inner, call, after = listed
    assert (inner.line, inner.module, inner.mode) == (line_of("return x * x", SquareFunction), "square", "function")
    assert (call.line, call.module) == (line_of("self.square(x.exp())", NetOfFunctions), "square")
    assert after.operands == (2,)


def test_operands_from_before_that_have_a_graph() -> None:
    net = nn.Linear(4, 4)
    leaf, made = torch.ones(4, requires_grad=True), {}

    def train() -> None:
        carried, data = leaf.exp(), torch.ones(4)
        made.update(carried=carried, data=data, leaf=leaf, cut=carried.detach())
        out = net(data)
        for each in made.values():
            out = out * each
        out.sum().backward()

    [(_, listed)] = operations_of(train, net)
    given = [each.operands[1] for each in listed if each.name == "mul"]
    assert given == [-2 if each.grad_fn is not None else -1 for each in made.values()]
    assert given == [-2, -1, -1, -1]


def test_the_nodes_are_those_that_torch_counts() -> None:
    net = Net()
    loss = net(torch.ones(5, 4)).softmax(-1).log().sum()
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions if each is not None]
    recording = rg.record(net)
    net(torch.ones(5, 4)).softmax(-1).log().sum().backward()
    recording.close()
    [size] = [each for each in read_facts(recording.history.events) if isinstance(each, GraphSize)]
    assert size.value == len(seen)


CUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "item": lambda x: x.sum().item(),
    "numpy": lambda x: x.detach().numpy(),
    "tolist": lambda x: x.tolist(),
    "argmax": lambda x: x.argmax(-1),
    "gt": lambda x: x > 0,
    "long": lambda x: x.long(),
    "tensor": lambda x: torch.tensor([each.item() for each in x.sum(1)]),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_graph_that_is_cut(name: str) -> None:
    net = nn.Linear(4, 3)

    def train() -> None:
        out = net(torch.ones(2, 4))
        CUTS[name](out)
        out.sum().backward()

    [(_, listed)] = operations_of(train, net)
    assert any(each.cuts for each in listed if each.name in (name, "detach", "item"))
    assert not any(each.cuts for each in listed if each.name in ("linear", "sum"))


def test_what_is_made_without_grad_is_said_to_be() -> None:
    net = nn.Linear(4, 3)

    def train() -> None:
        with torch.no_grad():
            hidden = net(torch.ones(2, 4))
        net(hidden @ torch.ones(3, 4)).sum().backward()

    [(_, listed)] = operations_of(train, net)
    assert [(each.name, each.mode, each.cuts) for each in listed if each.name == "linear"] == [
        ("linear", "no_grad", True),
        ("linear", "", False),
    ]


def test_a_pass_that_fails_leaves_its_operations() -> None:
    net = nn.Linear(4, 3)

    def train() -> None:
        loss = net(torch.ones(2, 4)).detach().sum()
        with pytest.raises(RuntimeError, match="does not require grad"):
            loss.backward()

    [(fact, listed)] = operations_of(train, net)
    assert [each.name for each in listed] == ["linear", "detach", "sum"]
    assert fact.loss == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["in the forward", "behind it"])
def test_a_program_that_fails_leaves_its_operations(error: type[BaseException], where: str) -> None:
    class Failing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x).exp()
            if where == "in the forward":
                raise error
            return x

    net = Failing(4, 3)

    def train() -> None:
        with pytest.raises(error):
            net(torch.ones(2, 4)).log()
            raise error

    [(fact, listed)] = operations_of(train, net)
    assert [each.name for each in listed][:2] == ["linear", "exp"]
    assert fact.loss == -1


def test_models_one_after_the_other_make_one_list() -> None:
    generator, critic = nn.Linear(4, 3), nn.Linear(3, 1)

    def train() -> None:
        fake = generator(torch.ones(2, 4))
        critic(fake.tanh()).mean().backward()

    [(fact, listed)] = operations_of(train, {"generator": generator, "critic": critic})
    assert [(each.name, each.module, each.operands[:1]) for each in listed] == [
        ("linear", "generator", (-1,)),
        ("tanh", "", (0,)),
        ("linear", "critic", (1,)),
        ("mean", "", (2,)),
    ]
    assert fact.outputs == (0, 2)


def test_what_is_as_before_is_written_once_and_what_changes_again() -> None:
    net = nn.Linear(4, 3)

    def train() -> None:
        for step, rows in enumerate([2, 5, 5, 5]):
            out = net(torch.ones(rows, 4))
            (out.exp() if step == 3 else out).sum().backward()
            torch.optim.SGD(net.parameters(), lr=0.1).step()

    found = operations_of(train, net)
    assert [(fact.step, [each.name for each in listed]) for fact, listed in found] == [
        (0, ["linear", "sum"]),
        (3, ["linear", "exp", "sum"]),
    ]


def test_operations_are_noted_behind_a_look_at_a_graph_that_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(4, 3)
    monkeypatch.undo()

    def train() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(20):
            out = net(torch.ones(2, 4))
            (out.exp() if step in (7, 8, 9, 10, 14, 15, 16, 17) else out).sum().backward()
            optimizer.step()

    noted: list[int] = []
    begin = OperationNotes.begin
    monkeypatch.setattr(OperationNotes, "begin", lambda notes: (noted.append(1), begin(notes)))
    found = operations_of(train, net)
    assert [(fact.step, [each.name for each in listed]) for fact, listed in found] == [
        (0, ["linear", "sum"]),
        (9, ["linear", "exp", "sum"]),
    ]
    assert len(noted) == 3  # at 0, 1 and 9: the graph of the look at 16 was known


class Careless(nn.Module):
    """Calls functions as statements; in others their results are used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bend, self.last = nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        h.clamp(-1, 1)
        self.bend(h)
        F.relu_(h)
        self.last(h)  # two functions
        self.kept.append(h.abs())
        _ = h.exp()
        print(h.neg().shape)
        assert h.sin().isfinite().all()
        torch.add(h, 1, out=torch.empty(3, 4)) if not torch.is_grad_enabled() else None
        return h.sqrt() if h.sum() is None else h


def test_results_that_a_statement_throws_away() -> None:
    net = Careless()
    [(fact, listed), *_] = operations_of(lambda: net(torch.ones(3, 4)).sum().backward(), net)
    assert fact.dropped is not None
    assert [listed[each].name for each in fact.dropped] == ["clamp", "relu"]


def test_writes_in_place_are_operations_on_what_was_there() -> None:
    net = nn.Linear(4, 3)

    def train() -> None:
        out = net(torch.ones(2, 4))
        out = out * 1
        out[0] = 0
        out.add_(1)
        out[:, 1:].mul_(2)
        out.sum().backward()

    [(_, listed)] = operations_of(train, net)
    names = [each.name for each in listed]
    assert names == ["linear", "mul", "setitem", "add_", "getitem", "mul_", "sum"]
    assert [each.operands[0] for each in listed] == [-1, 0, 1, 2, 3, 4, 5]


def test_graphs_that_are_held_are_counted() -> None:
    net = nn.Linear(4, 3)
    losses: list[torch.Tensor] = []

    def train(is_leaking: bool) -> list[GraphSize]:
        def run() -> None:
            for _ in range(6):
                loss = net(torch.ones(2, 4)).sum()
                loss.backward()
                if is_leaking:
                    losses.append(loss)

        return facts_while(run, net, GraphSize)

    assert [each.alive for each in train(is_leaking=True)] == [0, 1, 2, 3, 4, 5]
    assert [each.alive for each in train(is_leaking=False)] == [0] * 6
    assert len({each.value for each in train(is_leaking=False)}) == 1


# ---- nothing is changed ----


class Mixed(nn.Module):
    """Attention, frozen attention in eval mode, a checkpoint of each kind, a Function, writes, and randomness."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.3)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.frozen = nn.MultiheadAttention(8, 2, batch_first=True).requires_grad_(False)
        self.part = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU())
        self.cell = nn.LSTMCell(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.frozen.eval()
        with torch.no_grad():
            x = x + self.frozen(x, x, x, need_weights=False)[0]
        x = self.encoder(x)
        x = checkpoint(self.part, x, use_reentrant=False) + checkpoint(self.part, x, use_reentrant=True)
        x = Square.apply(x * 0.1)
        h = c = x.new_zeros(x.shape[0], 8)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        h = h.clone()
        h[:, :2] *= 2
        return self.head(h)


def train_mixed(is_recorded: bool, around: Callable[[], Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = Mixed()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    recording = rg.record(net) if is_recorded else None
    losses = []
    with around():
        for _ in range(3):
            x, y = torch.randn(4, 5, 8), torch.randint(0, 3, (4,))
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
    if recording is not None:
        recording.close()
        assert len([each for each in recording.history.events if each.kind == "operations"]) >= 1
        assert not [each for each in recording.history.events if each.kind == "fault"]
    return [*losses, *(each.detach().clone() for each in net.parameters()), torch.rand(1)]


class Counting(TorchFunctionMode):
    """A mode of the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "nothing": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "device": lambda: torch.device("cpu"),
    "own mode": Counting,
}


@pytest.mark.parametrize("around", SURROUNDINGS)
def test_every_bit_is_the_same(around: str) -> None:
    bare, recorded = (train_mixed(is_recorded, SURROUNDINGS[around]) for is_recorded in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(bare, recorded, strict=True))


def count_calls() -> list[tuple[int, int]]:
    net = nn.Linear(4, 3)
    counts = []
    recording = Recorder(net, History(), sources=(ForwardOperations, UnitLooks, NonFiniteLook))
    recording.attach()
    for _ in range(3):
        with Counting() as mode:
            loss = net(torch.ones(2, 4)).sum()
        with Counting() as other:
            loss = loss * 2
            with torch.device("cpu"):
                loss = loss + torch.zeros(())
                loss.backward()
        loss.detach()
        counts.append((mode.count, other.count))
    recording.close()
    assert torch._C._len_torch_function_stack() == 0
    return counts


def test_modes_that_the_program_enters_and_leaves_meanwhile_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = count_calls()
    monkeypatch.setattr(facts, "is_look", lambda recorded: False)
    assert noted == count_calls()


def test_functional_transforms_are_seen_and_left_alone() -> None:
    net = nn.Linear(4, 1)
    parameters = dict(net.named_parameters())

    def loss_of(own: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, own, (x,)).sum().tanh()

    def grads() -> dict[str, torch.Tensor]:
        per_sample = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))
        found: dict[str, torch.Tensor] = per_sample(parameters, torch.linspace(-1, 1, 12).view(3, 4))
        net(torch.ones(1, 4)).sum().backward()
        return found

    bare = grads()
    recording = rg.record(net)
    recorded = grads()
    recording.close()
    assert not [each for each in recording.history.events if each.kind == "fault"]
    assert all(torch.equal(bare[name], recorded[name]) for name in bare)


@pytest.fixture
def compiler() -> Iterator[Any]:
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    yield dynamo.utils.counters
    dynamo.reset()


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).tanh()


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.part = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(F.gelu(self.body(x)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler's own
@pytest.mark.parametrize("what", ["module", "part", "loss"])
def test_compiled_code_is_compiled_as_ever(what: str, compiler: Any) -> None:
    def train(is_recorded: bool) -> tuple[list[torch.Tensor], Any]:
        torch._dynamo.reset()
        compiler.clear()
        torch.manual_seed(0)
        net = Compiled()
        loss_of: Callable[..., torch.Tensor] = F.cross_entropy
        if what == "module":
            net.compile(backend="aot_eager")
        elif what == "part":
            net.part.compile(backend="aot_eager")
        else:
            loss_of = torch.compile(lambda out, y: F.cross_entropy(out.tanh(), y), backend="aot_eager")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        recording = rg.record(net) if is_recorded else None
        for _ in range(4):
            loss = loss_of(net(torch.randn(6, 4)), torch.randint(0, 3, (6,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if recording is not None:
            recording.close()
            facts = [each for each in read_facts(recording.history.events) if isinstance(each, Operations)]
            names = [operation.name for fact in facts for operation in fact.operations()]
            assert what == "module" or any("CompiledFunction" in name for name in names)
        return [each.detach() for each in net.parameters()], dict(compiler["stats"])

    (bare, counted), (recorded, counted_then) = train(False), train(True)
    taps = counted_then.pop("calls_captured") - counted.pop("calls_captured")
    assert counted == counted_then
    assert taps == {"module": 3, "part": 1, "loss": 0}[what]  # one for each module in the graph
    assert all(torch.equal(one, other) for one, other in zip(bare, recorded, strict=True))


def test_a_function_mode_is_put_away_by_the_update() -> None:
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    depths = []
    recording = rg.record(net)
    for _ in range(2):
        net(torch.ones(2, 4)).sum().backward()
        depths.append(torch._C._len_torch_function_stack())
        optimizer.step()
        depths.append(torch._C._len_torch_function_stack())
    recording.close()
    assert depths == [1, 0, 1, 0]


def test_lines_of_a_program_that_has_many_operations_are_cut() -> None:
    net = nn.Linear(2, 2)

    def train() -> None:
        x = net(torch.ones(1, 2))
        for _ in range(3100):
            x = x + 1
        x.sum().backward()

    [(fact, listed)] = operations_of(train, net)
    assert fact.is_cut
    assert 3000 <= len(listed) <= 3001  # with the loss
    assert inspect.getsourcefile(Net) in listed[0].line
