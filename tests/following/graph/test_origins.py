"""Where nodes were made: lines against what torch's anomaly mode says, modules against hooks on each module."""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import TraceError
from retrograd.core.hooks.nodes import edges_of, is_leaf, number_of
from retrograd.following.graph.origin import Origin
from retrograd.following.graph.origins import Origins, record_origins
from retrograd.following.graph.walker import walk


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 * x


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)), nn.Softmax(-1))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.cell(x) + x
        return x


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight).relu()
        y = Square.apply(self.inner(x))
        z = torch.cat(
            [
                y[:, :2],
                2
                * y[:, 2:],
            ],
            dim=1,
        )  # fmt: skip
        z = z.clone()
        z[0] = 1.0
        return F.dropout(z, 0.5).T.T


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.cell = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        return self.cell(self.attention(x, x, x)[0])[0]


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Shared() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.net(x).pow(2).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return slope.pow(2).sum() + Square.apply(y)


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "shared": Shared,
    "functional": Functional,
    "attention": Attention,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed-reentrant": lambda: Checkpointed(reentrant=True),
    "double-backward": Penalised,
}


@pytest.fixture(params=NETS)
def net(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return NETS[request.param]()


def nodes_of(root: Tensor) -> Iterator[Any]:
    """Every node of the graph but those of leaves."""
    seen: set[Any] = set()
    waiting = [root.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and not is_leaf(node):
            seen.add(node)
            waiting.extend(below for below, _ in edges_of(node))
            yield node


def find(origins: Origins, tensor: Tensor) -> Origin:
    origin = origins.find(number_of(tensor.grad_fn))
    assert origin is not None
    return origin


def user_line(traceback: list[str]) -> tuple[str, int]:
    """File and line of the innermost of the user's frames, as anomaly mode formats them."""
    for entry in reversed(traceback):
        file, line = entry.strip().split("\n")[0].removeprefix('File "').split('", line ')
        if "/torch/" not in file and "/retrograd/core/hooks/" not in file:
            return file, int(line.split(",")[0])
    raise AssertionError(traceback)


class Watch:
    """The oracle of modules: hooks on each note which numbers its calls made."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[tuple[str, int, int, int]] = []
        self.outputs: list[tuple[str, int]] = []
        self._open: list[tuple[str, int, int]] = []
        self._counts: dict[str, int] = {}
        self._handles = []
        for path, module in model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(lambda *_, path=path or "self": self._begin(path)),
                module.register_forward_hook(lambda *given, path=path or "self": self._end(path, *given)),
            ]

    def _begin(self, path: str) -> None:
        self._counts[path] = self._counts.get(path, 0) + 1
        self._open.append((path, self._counts[path], torch.autograd._get_sequence_nr()))

    def _end(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        path, call, first = self._open.pop()
        self.calls.append((path, call, first, torch.autograd._get_sequence_nr()))
        if isinstance(output, Tensor) and output.grad_fn is not None and not list(module.children()):
            self.outputs.append((path, number_of(output.grad_fn)))

    def of(self, number: int) -> tuple[str, int]:
        """Inner calls end before those around them."""
        return next((path, call) for path, call, first, last in self.calls if first <= number < last)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_every_node_has_the_line_that_anomaly_mode_gives(net: nn.Module) -> None:
    with torch.autograd.detect_anomaly(check_nan=False), record_origins() as origins:
        loss = net(torch.randn(3, 4)).sum()
    for node in nodes_of(loss):
        origin = origins.find(number_of(node))
        assert origin is not None
        assert origin.line is not None
        assert (origin.line.file, origin.line.line) == user_line(node.metadata["traceback_"])


@pytest.mark.parametrize("lines", [True, False])
def test_every_node_has_the_module_call_that_made_it(net: nn.Module, lines: bool) -> None:
    watch = Watch(net)
    with record_origins(lines=lines) as origins:
        output = net(torch.randn(3, 4))
    watch.remove()
    for node in nodes_of(output):
        origin = origins.find(number_of(node))
        assert origin is not None
        assert (origin.module, origin.call) == watch.of(number_of(node))
    spans = [(span.module, span.call, span.first, span.last) for span in origins.spans]
    assert sorted(spans) == sorted(watch.calls)


@pytest.mark.parametrize("lines", [True, False])
def test_results_are_bitwise_those_without(net: nn.Module, lines: bool) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(1)
        net.zero_grad()
        x = torch.randn(3, 4, requires_grad=True)
        output = net(x)
        output.sum().backward()
        return [output, *(tensor.grad for tensor in (x, *net.parameters()) if tensor.grad is not None)]

    plain = run()
    with record_origins(lines=lines):
        recorded = run()
    assert len(plain) == len(recorded)
    assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_modules_are_named_and_numbered_as_in_their_forward(reentrant: bool) -> None:
    net = Checkpointed(reentrant=reentrant)
    watch = Watch(net)
    with record_origins() as origins:
        loss = net(torch.randn(3, 4)).sum()
        forward = len(origins.spans)
        seen = len(watch.outputs)
        loss.backward()
    watch.remove()
    spans = origins.spans
    assert [span.recompute for span in spans] == [False] * forward + [True] * (len(spans) - forward)
    calls = {(span.module, span.call) for span in spans if not span.recompute}
    again = [(span.module, span.call) for span in spans if span.recompute]
    assert len(set(again)) == len(again)
    assert set(again) == {(path, call) for path, call in calls if path.startswith("blocks.")}
    assert len(watch.outputs) > seen
    for path, number in watch.outputs[seen:]:
        origin = origins.find(number)
        assert origin is not None
        assert origin.module == path
        assert origin.line is not None


def test_lines_are_those_of_the_source() -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = x * 2
        second = (
            F
            .softplus(first)
        )  # fmt: skip
        return first, second, second.T

    with record_origins() as origins:
        tensors = forward(torch.randn(3, 3, requires_grad=True))
    start = inspect.getsourcelines(forward)[1]
    lines = [find(origins, tensor).line for tensor in tensors]
    assert [(line.line - start, line.operation) for line in lines if line] == [(1, "mul"), (3, "softplus"), (6, "T")]
    assert {(line.file, line.function) for line in lines if line} == {(__file__, "forward")}
    assert [find(origins, tensor).module for tensor in tensors] == [None] * 3


def test_a_custom_function_has_the_line_that_applied_it() -> None:
    with record_origins() as origins:
        square = Square.apply(torch.randn(3, requires_grad=True))
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    found = find(origins, square).line
    assert found is not None
    assert (found.line, found.operation) == (line, "Square")


def test_a_node_made_in_a_python_backward_belongs_to_the_module_of_its_function() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Square.apply(x)

    x = torch.randn(3, requires_grad=True)
    with record_origins() as origins:
        (slope,) = torch.autograd.grad(Net()(x).sum(), x, create_graph=True)
    origin = find(origins, slope)
    assert origin.module == "self"
    assert origin.line is not None
    assert origin.line.function == "backward"


def test_names_are_relative_to_the_outermost_module_and_parts_keep_theirs() -> None:
    net = nn.ModuleDict({"encoder": mlp(), "decoder": Shared()})
    net.forward = lambda x: net["decoder"](net["encoder"](x))  # type: ignore[method-assign, operator]
    x = torch.randn(3, 4)
    with record_origins() as origins:
        net(x)
        alone = net["encoder"](x)  # type: ignore[operator]
        loss = nn.MSELoss()(alone, x)
    assert find(origins, alone).module == "encoder.3"
    assert find(origins, loss).module == "MSELoss"
    assert {span.module for span in origins.spans} >= {"self", "encoder", "decoder", "decoder.cell.0"}
    assert origins.name_parameter(net["decoder"].cell[0].weight) == "decoder.cell.0:weight"  # type: ignore[index, union-attr]
    assert origins.name_parameter(x) is None


def test_given_models_have_their_names_and_others_none() -> None:
    generator, critic = mlp(), Shared()
    with record_origins({"generator": generator, "critic": critic}) as origins:
        output = critic(generator(torch.randn(3, 4)))
        loss = nn.MSELoss()(output, torch.zeros_like(output))
    assert find(origins, output).module == "critic"
    assert find(origins, loss).module is None
    assert {span.module for span in origins.spans} >= {"generator", "generator.2.1", "critic.cell.1"}
    assert origins.name_parameter(critic.cell[0].bias) == "critic.cell.0:bias"
    assert origins.name_parameter(next(generator.parameters())) == "generator.0:weight"


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TraceError, match=r"not a torch\.nn\.Module"):
        record_origins({"net": 3})  # type: ignore[dict-item]
    origins = record_origins()
    with origins, pytest.raises(TraceError, match="already"), origins:
        pass


def test_a_forward_that_raises_leaves_the_names_right() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise self.error  # type: ignore[misc]

    failing, net = Failing(), Shared()
    whole = nn.Sequential(nn.Linear(4, 4), nn.Sequential(failing), net)
    with record_origins() as origins:
        for error in (ValueError("no"), KeyboardInterrupt()):
            failing.error = error  # type: ignore[assignment]
            with pytest.raises(type(error)):
                whole(torch.randn(3, 4))
            for _ in range(2):
                output = net(torch.randn(3, 4))
                assert (find(origins, output).module, find(origins, output).call) == ("2", 1)
    assert [span.module for span in origins.spans].count("2.cell") == 12


def test_a_hook_of_the_users_that_raises_leaves_the_names_right() -> None:
    net = Shared()

    def refuse(module: nn.Module, args: Any) -> None:
        if module is net.cell[1]:
            raise ValueError("no")

    handle = nn.modules.module.register_module_forward_pre_hook(refuse)
    with record_origins() as origins:
        with pytest.raises(ValueError, match="no"):
            net(torch.randn(3, 4))
        handle.remove()
        output = net.cell(torch.randn(3, 4))
    assert find(origins, output).module == "cell.1"


def test_calls_of_a_module_within_itself() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            return self(x * 2, depth - 1) + 1 if depth else x * 3

    with record_origins() as origins:
        output = Twice()(torch.randn(3, requires_grad=True), 2)
    assert [(span.module, span.call) for span in origins.spans] == [("self", 1), ("self", 2), ("self", 3)]
    assert find(origins, output).call == 1
    numbers = range(number_of(output.grad_fn) + 1)
    assert [origin.call for number in numbers[-5:] if (origin := origins.find(number))] == [1, 2, 3, 2, 1]


def test_threads_have_numbers_of_their_own() -> None:
    net = Shared()
    found: dict[int, Origin | None] = {}
    ready = threading.Barrier(3)

    def work(scale: float) -> None:
        x = torch.randn(3, 4) * scale
        ready.wait(10)
        output = net(x)
        ready.wait(10)
        number, thread = number_of(output.grad_fn), threading.get_ident()
        found[thread] = origins.find(number, thread)
        assert origins.find(number) == found[thread]
        ready.wait(10)

    with record_origins() as origins:
        threads = [threading.Thread(target=work, args=(scale,)) for scale in (1.0, 2.0)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            ready.wait(10)
        for thread in threads:
            thread.join()
    assert len(found) == 2
    assert all(origin is not None and origin.module == "self" and origin.line is not None for origin in found.values())
    assert {span.thread for span in origins.spans} == set(found)


@pytest.mark.parametrize("start", ["thread", "subclass", "pool"])
def test_what_threads_do_outside_of_modules_has_its_line(start: str) -> None:
    results: list[Tensor] = []

    def work() -> None:
        results.append((torch.ones(3, requires_grad=True) * 2).sin().sum())  # this line
        modes.append(torch._C._len_torch_function_stack())

    class Worker(threading.Thread):
        def run(self) -> None:
            work()

    modes: list[int] = []
    with record_origins() as origins:
        if start == "pool":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(work).result()
        else:
            thread = Worker() if start == "subclass" else threading.Thread(target=work)
            thread.start()
            thread.join()
    assert modes == [1]
    lines = [each.line and each.line.line for each in walk(results[0], origins=origins) if not each.is_leaf]
    assert lines == [inspect.getsourcelines(work)[1] + 1] * 3
    assert [each.line.operation for each in walk(results[0], origins=origins) if each.line] == ["sum", "sin", "mul"]


@pytest.mark.parametrize("leave", ["in the thread", "in another thread", "in a pass"])
def test_the_mode_leaves_every_thread_at_its_next_call(leave: str) -> None:
    left, go_on = threading.Event(), threading.Event()
    modes: list[list[int]] = [[], []]
    net = nn.Linear(3, 3)

    def count(place: int) -> None:
        net(torch.ones(3))
        modes[place].append(torch._C._len_torch_function_stack())

    def work() -> None:
        count(1)
        left.set()
        assert go_on.wait(30)
        count(1)

    origins = record_origins()
    origins.__enter__()
    thread = threading.Thread(target=work)
    thread.start()
    assert left.wait(30)
    count(0)
    if leave == "in a pass":  # torch has put the mode aside, and puts it back when this has returned
        loss = net(torch.ones(3)).sum()
        loss.register_hook(lambda gradient: origins.__exit__(None, None, None))
        loss.backward()
    elif leave == "in another thread":
        with ThreadPoolExecutor(1) as pool:
            pool.submit(origins.__exit__, None, None, None).result()
    else:
        origins.__exit__(None, None, None)
    count(0)
    go_on.set()
    thread.join()
    assert modes == [[1, 0], [1, 0]]


def test_a_thread_that_uses_no_torch_leaves_nothing_behind_and_one_that_does_later_leaves_the_mode() -> None:
    begun, go_on = threading.Event(), threading.Event()
    modes: list[int] = []
    net = nn.Linear(3, 3)
    before = dict(modules._global_forward_hooks), dict(modules._global_forward_pre_hooks)

    def work() -> None:
        begun.set()
        assert go_on.wait(30)
        modes.append(torch._C._len_torch_function_stack())
        torch.ones(3, requires_grad=True).sin()
        net(torch.ones(3))
        modes.append(torch._C._len_torch_function_stack())

    with record_origins() as origins:
        thread = threading.Thread(target=work)
        thread.start()
        assert begun.wait(30)
        net(torch.ones(3))
    assert (dict(modules._global_forward_hooks), dict(modules._global_forward_pre_hooks)) == before
    go_on.set()
    thread.join()
    assert modes == [1, 0]
    assert {span.thread for span in origins.spans} == {threading.get_ident()}


def test_a_recording_that_is_entered_again_before_the_mode_has_left_goes_on() -> None:
    origins = record_origins()
    x = torch.ones(3, requires_grad=True)

    def leave_and_enter(gradient: Tensor) -> None:
        origins.__exit__(None, None, None)
        origins.__enter__()

    origins.__enter__()
    loss = (x * 2).sum()
    loss.register_hook(leave_and_enter)
    loss.backward()
    nn.Linear(3, 3)(x)
    assert find(origins, x * 3).line is not None
    origins.__exit__(None, None, None)
    nn.Linear(3, 3)(x)


def test_nested_recordings_see_the_same() -> None:
    net = Shared()
    with record_origins() as outer:
        with record_origins() as inner:
            output = net(torch.randn(3, 4))
        after = net(output)
    for node in nodes_of(output):
        assert inner.find(number_of(node)) == outer.find(number_of(node))
    assert inner.find(number_of(after.grad_fn)) is None
    assert find(outer, after).module == "self"


def test_recordings_that_do_not_end_in_order() -> None:
    first, second = record_origins(), record_origins()
    x = torch.randn(3, requires_grad=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    y = x * 2
    second.__exit__(None, None, None)
    assert first.find(number_of(y.grad_fn)) is None
    assert find(second, y).line is not None


def test_a_recording_can_be_entered_again() -> None:
    net, origins = Shared(), record_origins()
    for _ in range(2):
        with origins:
            output = net(torch.randn(3, 4))
        net(torch.randn(3, 4))
        assert find(origins, output).module == "self"
        assert find(origins, output).line is not None
    assert [span.module for span in origins.spans].count("self") == 2


def test_names_are_found_where_nobody_holds_the_origins() -> None:
    net = Shared()
    with record_origins():
        output = net(torch.randn(3, 4))
    gc.collect()
    for _ in range(2):  # found again and again, until others are recorded
        graph = walk(output)
        assert all(node.module is not None and node.line is not None for node in graph if not node.is_leaf)
    with record_origins() as origins:
        pass
    assert not any(node.module or node.line for node in walk(output))
    del origins
    assert not any(node.module or node.line for node in walk(output))


def test_origins_that_were_asked_are_gone_when_they_are_dropped() -> None:
    net = Shared()
    with record_origins() as origins:
        output = net(torch.randn(3, 4))
    assert all(node.line for node in walk(output) if not node.is_leaf)
    del origins
    assert not any(node.line for node in walk(output))


def test_memory_is_bounded() -> None:
    x = torch.randn(3, requires_grad=True)
    net = nn.Identity()
    with record_origins(limit=100) as origins:
        for _ in range(500):
            y = net(x) * 2
        held = [number for number in range(number_of(y.grad_fn) + 1) if origins.find(number) is not None]
        assert 40 < len(held) <= 102
        assert held[-1] == number_of(y.grad_fn)
        assert len(origins.spans) <= 101
        origins.clear()
        assert origins.find(number_of(y.grad_fn)) is None
        assert not origins.spans
        y = x * 2
        assert find(origins, y).line is not None
        with torch.no_grad():
            before = torch.autograd._get_sequence_nr()
            y = net(x).sin().exp()
            assert origins.find(before) is None


def test_models_that_change() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    with record_origins() as origins:
        net(torch.randn(3, 4))
        net.append(nn.Linear(4, 2))
        output = net(torch.randn(3, 4))
        assert find(origins, output).module == "1"
        assert origins.name_parameter(net[1].weight) == "1:weight"

        class Making(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return nn.Linear(4, 4)(x)

        output = Making()(torch.randn(3, 4))
        assert find(origins, output).module == "self"


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forwards_without_a_graph(mode: Callable[[], Any]) -> None:
    for make in NETS.values():
        torch.manual_seed(0)
        net = make().eval()
        if isinstance(net, Penalised):
            continue
        x = torch.randn(3, 4)
        with mode():
            torch.manual_seed(1)
            plain = net(x)
            torch.manual_seed(1)
            with record_origins() as origins:
                assert torch.equal(net(x), plain)
        assert origins.spans


@pytest.mark.parametrize("needs", ["nothing", "input", "weights"])
def test_fused_kernels_stay_fused(needs: str) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(needs == "weights")
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 8, requires_grad=needs == "input")
    plain = net(x)
    with record_origins() as origins:
        output = net(x)
    assert torch.equal(plain, output)
    if needs != "nothing":
        assert find(origins, output).line is not None


def test_transforms_and_scripts_and_odd_calls_go_on_as_ever() -> None:
    x = torch.randn(4, 4)
    net = nn.Linear(4, 4)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    def run() -> list[Tensor]:
        return [
            torch.func.grad(lambda t: net(t).sin().sum())(x),
            torch.func.vmap(lambda t: net(t).sum())(x),
            torch.func.jacrev(lambda t: (t * t).sum(0))(x),
            torch.func.jvp(lambda t: t.cos(), (x,), (x,))[1],
            torch.func.functional_call(net, {"weight": x, "bias": x[0]}, (x,)),
            torch.func.vmap(torch.func.grad(lambda t: (net(t) ** 2).sum()))(x),
            scripted(x),
            torch.ops.aten.mul(x, net.weight),
            torch.tensor([float(torch.is_tensor(x)), float(x.dim()), x.sum().item()]),
        ]

    plain = run()
    with record_origins() as origins:
        recorded = run()
        output = scripted(x)
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))
    found = find(origins, output)
    assert found.module == "self"
    assert found.line is not None
    assert (found.line.line, found.line.operation) == (line, "Sequential")


def test_operations_that_raise_raise_the_same() -> None:
    def fail() -> str:
        with pytest.raises(RuntimeError) as caught:
            torch.randn(3, requires_grad=True) @ torch.randn(4)
        return str(caught.value)

    plain = fail()
    with record_origins():
        assert fail() == plain


def test_a_model_made_anew_for_each_call() -> None:
    net = Shared()
    x = torch.randn(3, 4)
    with record_origins() as origins:
        for _ in range(50):
            output = nn.Sequential(*net.children())(x)
        assert find(origins, output).module == "0.1"
        assert find(origins, net(x)).module == "self"
        assert find(origins, net.cell(x)).module == "cell.1"
