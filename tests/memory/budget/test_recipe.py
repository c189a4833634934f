"""What is saved is recomputed: every bit is that of plain autograd."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from retrograd.core.errors import OverwrittenError
from retrograd.memory.budget.planned import Planned
from retrograd.memory.budget.recipe import Recipe
from retrograd.memory.saved.keeping import keep_saved
from tests.memory.budget.forced_recipes import force_recomputing, recomputed
from tests.scenarios import bits

Result = list[tuple[str, bytes]]
Step = Callable[[nn.Module], object]


class Applied(nn.Module):
    """A function of a module and what it is called with."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def chain(*parts: nn.Module, width: int = 16) -> nn.Module:
    """Parts between linear layers, each of which saves its input."""
    layers = [layer for part in parts for layer in (nn.Linear(width, width), part)]
    return nn.Sequential(*layers, nn.Linear(width, width))


def image_chain(*parts: nn.Module) -> nn.Module:
    layers = [layer for part in parts for layer in (nn.Conv2d(4, 4, 3, padding=1), part)]
    return nn.Sequential(*layers, nn.Conv2d(4, 4, 1))


def train(model: nn.Module, step: Step, policy: Planned | None, passes: int = 4, *, everywhere: bool = False) -> Result:
    """All that is left of some passes: outputs, gradients, buffers, and the state of the generator."""
    torch.manual_seed(8)
    seen: Result = []
    kept = None if everywhere else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with nullcontext() if policy is None else keep_saved(kept, policy):
        for number in range(passes):
            optimizer.zero_grad()
            seen += bits(f"pass {number}", step(model))
            seen += bits(f"gradients {number}", [parameter.grad for parameter in model.parameters()])
            seen += bits(f"buffers {number}", list(model.buffers()))
            optimizer.step()
    return [*seen, *bits("generator", torch.get_rng_state())]


def check(
    patch: pytest.MonkeyPatch,
    make: Callable[[], nn.Module],
    step: Step,
    words: set[str],
    *,
    everywhere: bool = False,
    passes: int = 4,
) -> Planned:
    """The same with and without; and ``words`` are among the operations that were run again."""

    def build() -> nn.Module:
        torch.manual_seed(4)
        return make()

    expected = train(build(), step, None, passes)
    policy = force_recomputing(patch)
    runs: list[str] = []
    plain_run = Recipe.run

    def run(recipe: Recipe, **given: Any) -> Any:
        runs.append(str(recipe))
        return plain_run(recipe, **given)

    with patch.context() as scope:
        scope.setattr(Recipe, "run", run)
        found = train(build(), step, policy, passes, everywhere=everywhere)
    assert [name for (name, value), (_, other) in zip(found, expected, strict=True) if value != other] == []
    assert words <= recomputed(policy), recomputed(policy)
    followed = sum(choice == "recompute" for plan in policy.plans for choice in plan.choices)
    assert not words or len(runs) > followed  # in the measured pass, and then to follow the plan
    assert policy._counter.total() == 0
    return policy


def on(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> Step:
    def step(model: nn.Module) -> Tensor:
        out = model(torch.randn(*shape, dtype=dtype).to(**options))
        loss: Tensor = (out.real if out.is_complex() else out.float()).square().sum()
        loss.backward()
        return loss

    return step


def autocast(step: Step) -> Step:
    def inner(model: nn.Module) -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(model)

    return inner


# ---- operations -----------------------------------------------------------------------------------------------


def heads(self: Any, x: Tensor) -> Tensor:
    q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p if self.training else 0.0)
    return self.out(mixed.transpose(1, 2).flatten(2))


def explicit_generator(self: Any, x: Tensor) -> Tensor:
    generator = self.__dict__.setdefault("generator", torch.Generator().manual_seed(11))  # drawn from in each pass
    noise = torch.empty_like(x).bernoulli_(0.5, generator=generator)
    more = torch._standard_gamma(x.abs() + 1, generator)
    y = self.a(x) * noise * more
    return self.a(y.mul(torch.rand(x.shape, generator=generator))) + generator.get_state()[0]


def many_draws(self: Any, x: Tensor) -> Tensor:
    y = self.a(x) * torch.randn_like(x) * torch.rand(x.shape) * torch.randn(()) * torch.randperm(16)
    y = F.rrelu(y, training=True) * torch.empty_like(x).normal_().exponential_()
    return self.a(torch.multinomial(y.softmax(-1), 4).repeat(1, 4) * y)


def outputs(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        noise = torch.empty_like(x)
        torch.mul(x, 2, out=noise)
        values, where = torch.empty(x.shape), torch.empty(x.shape, dtype=torch.long)
        torch.sort(x, out=(values, where))
    return self.a(self.a(x) * noise).gather(1, where) * values


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        y.detach().numpy()[...] **= 3  # what no operation tells of
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return grad * (3 * x * x + 0 * y)


def first_of(self: Any, x: Tensor) -> Any:
    return self.inner(x)[0]


def tokens(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randint(0, 20, (6, 16))).square().sum()
    loss.backward()
    return loss


def linears(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        weight = nn.Parameter(torch.eye(16) * 0.5)
        return Applied(function, a=nn.Linear(16, 16), b=nn.Linear(16, 16), c=nn.Linear(32, 16), w=weight)

    return make


CASES: dict[str, tuple[Callable[[], nn.Module], Step, set[str]]] = {
    "batch norm without statistics": (
        lambda: image_chain(nn.BatchNorm2d(4, track_running_stats=False), nn.BatchNorm2d(4, momentum=None)),
        on(2, 4, 8, 8),
        {"batch_norm", "convolution"},
    ),
    "batch norm that is evaluated": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4).eval(), nn.ReLU(True), nn.Conv2d(4, 4, 1)),
        on(2, 4, 8, 8),
        {"batch_norm", "relu"},
    ),
    "other norms": (
        lambda: image_chain(
            nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.LayerNorm(8)
        ),
        on(2, 4, 8, 8),
        {"group_norm", "layer_norm"},
    ),
    "dropouts": (
        lambda: chain(nn.Dropout(0.3), nn.Dropout(0.3, inplace=True), nn.AlphaDropout(0.4), nn.Dropout(0.5).eval()),
        on(6, 16),
        {"bernoulli", "mul"},
    ),
    "autocast": (lambda: chain(nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2)), autocast(on(6, 16)), {"to_copy", "gelu"}),
    "embedding": (lambda: nn.Sequential(nn.Embedding(20, 16, max_norm=2.0), chain(nn.Tanh())), tokens, {"addmm"}),
    "attention": (
        lambda: Applied(heads, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16), p=0.0),
        on(2, 5, 16),
        {"scaled_dot_product_flash_attention_for_cpu"},
    ),
    "multi-head attention": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True),
        on(2, 5, 16),
        {"layer_norm", "bernoulli"},
    ),
    "LSTM": (lambda: Applied(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(8, 8, 2, dropout=0.3)), on(5, 2, 8), set()),
    "GRU": (
        lambda: Applied(lambda self, x: self.gru(x)[0], gru=nn.GRU(8, 8, 2, bidirectional=True)),
        on(5, 2, 8),
        set(),
    ),
    "explicit generators": (linears(explicit_generator), on(6, 16), {"bernoulli", "standard_gamma", "rand"}),
    "draws": (linears(many_draws), on(6, 16), {"randn_like", "normal", "exponential", "randn"}),
    "out=": (linears(outputs), on(6, 16), {"addmm"}),
    "a Function that writes unseen": (linears(lambda self, x: self.b(Cube.apply(self.a(x)))), on(6, 16), {"addmm"}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_bit_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, step, words = CASES[name]
    check(monkeypatch, make, step, words)


@pytest.mark.parametrize("name", ["dropouts", "other norms", "attention", "autocast", "out="])
def test_in_the_whole_process_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, step, words = CASES[name]
    check(monkeypatch, make, step, words, everywhere=True)


def test_memory_that_no_operation_fills_is_never_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half is written by numpy. What lay in that memory before may be the very same bytes."""

    class HalfFilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            half, whole = torch.empty_like(x), torch.empty_like(x)
            half[:3].copy_(x[:3]).mul_(2)
            half.numpy()[3:] = 0
            whole.copy_(x).mul_(2)
            return self.b(self.a(x) * half) * whole

    plain_run = Recipe.run

    def run(recipe: Recipe, **given: Any) -> Any:
        """Where blank memory is always zero."""
        with monkeypatch.context() as scope:
            operation = torch.ops.aten.empty_like.default
            plain_call = type(operation).__call__
            scope.setattr(
                type(operation),
                "__call__",
                lambda self, *args, **kwargs: (
                    plain_call(self, *args, **kwargs).zero_()
                    if self is operation
                    else plain_call(self, *args, **kwargs)
                ),
            )
            return plain_run(recipe, **given)

    monkeypatch.setattr(Recipe, "run", run)
    policy = check(monkeypatch, HalfFilled, on(6, 16), {"copy", "mul"})
    choices = [saved_range.recompute for saved_range in policy.plans[0].recording.ranges]
    assert choices.count("copy, mul") == 1  # the whole one


# ---- passes ---------------------------------------------------------------------------------------------------


def activations() -> nn.Module:
    return chain(nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.3), nn.ReLU(True))


def batch(rows: int = 6) -> Tensor:
    return torch.randn(rows, 16)


def loss_of(model: nn.Module, rows: int = 6) -> Tensor:
    loss: Tensor = model(batch(rows)).square().sum()
    return loss


def plain(model: nn.Module) -> None:
    loss_of(model).backward()


def penalised(self: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = self.b(torch.tanh(self.a(x)))
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + slope.square().sum()


def test_a_gradient_inside_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, linears(penalised), on(6, 16), set())


def test_control_flow_that_changes_between_passes_of_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan was made from one activation; another one is run again where another one ran."""

    def switching(self: Any, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        function = (torch.sigmoid, torch.tanh, torch.exp)[self.calls % 3]
        y = function(self.a(x))
        return self.b(y * y.detach().mul(0.5))

    check(monkeypatch, linears(switching), on(6, 16), {"mul"}, passes=7)


def test_in_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward in threads of their own, one after the other."""

    def step(model: nn.Module) -> Tensor:
        losses: list[Tensor] = []
        for work in (lambda: losses.append(loss_of(model)), lambda: losses[0].backward()):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return losses[0]

    check(monkeypatch, lambda: chain(nn.LayerNorm(16), nn.GELU()), step, {"addmm", "gelu"})


def test_two_models_under_two_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """One lies in the other, so that both see the operations of the inner one."""

    def gradients(*, is_kept: bool) -> Result:
        torch.manual_seed(2)
        model = nn.Sequential(activations(), activations())
        inner, outer = force_recomputing(monkeypatch), force_recomputing(monkeypatch)
        with (
            keep_saved(model, outer) if is_kept else nullcontext(),
            keep_saved(model[0], inner) if is_kept else nullcontext(),
        ):
            for _ in range(4):
                loss_of(model).backward()
        assert not is_kept or (recomputed(inner) and recomputed(outer))
        return [*bits("", [p.grad for p in model.parameters()]), *bits("generator", torch.get_rng_state())]

    assert gradients(is_kept=True) == gradients(is_kept=False)


@pytest.mark.parametrize("mode", ["deterministic", "anomaly", "warnings"])
def test_under_what_watches_torch(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.is_deterministic_algorithms_warn_only_enabled(), torch.are_deterministic_algorithms_enabled()
    try:
        if mode == "deterministic":
            torch.set_deterministic_debug_mode("error")
        if mode == "warnings":
            torch.set_warn_always(True)
        with torch.autograd.set_detect_anomaly(mode == "anomaly"):
            check(monkeypatch, activations, plain, {"addmm", "gelu"})
    finally:
        torch.set_warn_always(False)
        torch.use_deterministic_algorithms(before[1], warn_only=before[0])


def test_what_fails_when_it_is_tried_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(recipe: Recipe, **given: Any) -> Any:
        raise RuntimeError("no kernel")

    policy = force_recomputing(monkeypatch)
    torch.manual_seed(4)
    expected = train(activations(), plain, None)
    monkeypatch.setattr(Recipe, "run", fail)
    torch.manual_seed(4)
    assert train(activations(), plain, policy) == expected
    assert not recomputed(policy)


def test_a_copy_of_the_model_trains_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    model = activations()
    policy = force_recomputing(monkeypatch)
    with keep_saved(model, policy):
        for _ in range(3):
            plain(model)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        model.zero_grad()
        for each in (model, *copies):
            each.zero_grad()
            torch.manual_seed(6)
            plain(each)
    first, *others = (bits("", [parameter.grad for parameter in each.parameters()]) for each in (model, *copies))
    assert all(other == first for other in others)


# ---- writes between forward and backward ----------------------------------------------------------------------


def after_two_passes(model: nn.Module, policy: Planned, x: Tensor, between: Callable[[], object]) -> None:
    """The third one follows the plan."""
    with keep_saved(model, policy):
        for _ in range(2):
            model(x).square().sum().backward()
        model.zero_grad()
        loss = model(x).square().sum()
        between()
        loss.backward()


@pytest.mark.parametrize("name", ["1.bias", "0.weight", "1.running_mean"])
def test_a_write_into_what_it_is_recomputed_from_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd itself saves none of these: it would go on with what it has kept."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4).eval(), nn.Sigmoid(), nn.Conv2d(4, 4, 1))
    written = {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]
    x = torch.randn(2, 4, 8, 8)
    policy = force_recomputing(monkeypatch)

    def write() -> None:
        with torch.no_grad():
            written.add_(1)

    with pytest.raises(OverwrittenError, match="has been written to since"):
        after_two_passes(model, policy, x, write)
    assert "batch_norm" in recomputed(policy)


def test_a_write_into_a_source_that_the_pass_itself_does_not_need_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last layer is trained, so that autograd never asks for what the first one has saved."""
    policy = force_recomputing(monkeypatch)
    model = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 16))
    last = list(model[2].parameters())
    x = batch()
    with keep_saved(model, policy):
        for _ in range(2):
            model(x).square().sum().backward()
        loss = model(x).square().sum()
        x.add_(1)
        with pytest.raises(OverwrittenError, match="has been written to since"):
            torch.autograd.grad(loss, last)
    assert "sigmoid" in recomputed(policy)


def test_a_parameter_that_is_exchanged_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in plain autograd, where the old values are the saved ones."""
    model = chain(nn.Sigmoid())
    x = batch()

    def exchange() -> None:
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter)

    state = {name: value.clone() for name, value in model.state_dict().items()}
    loss = model(x).square().sum()
    exchange()
    loss.backward()
    expected = bits("", [parameter.grad for parameter in model.parameters()])
    model.load_state_dict(state)
    policy = force_recomputing(monkeypatch)
    after_two_passes(model, policy, x, exchange)
    assert "sigmoid" in recomputed(policy)
    assert bits("", [parameter.grad for parameter in model.parameters()]) == expected


def test_memory_that_is_taken_from_a_parameter_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharded models free what they have gathered."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 16))
    policy = force_recomputing(monkeypatch)
    storage = model[0].bias.untyped_storage()
    with pytest.raises(OverwrittenError):
        after_two_passes(model, policy, batch(), lambda: storage.resize_(0))
    assert recomputed(policy) >= {"sigmoid", "addmm"}


# ---- nobody notices -------------------------------------------------------------------------------------------


class Listing(TorchDispatchMode):
    """A mode of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ["around", "inside"])
def test_modes_of_the_program_see_what_they_would_without_recomputing(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing is seen, as under every policy; noting, trying and running again are not."""

    def listed(policy: Planned) -> tuple[list[str], int]:
        torch.manual_seed(2)
        model, listing, flops = activations(), Listing(), FlopCounterMode(display=False)
        with keep_saved(model, policy):
            for _ in range(3):
                if where == "around":
                    with listing, flops:
                        loss_of(model).backward()
                else:
                    wrapped = Applied(lambda self, x: enter(self.model, x, listing, flops), model=model)
                    wrapped(batch()).square().sum().backward()
        return listing.seen, flops.get_total_flops()

    def enter(model: nn.Module, x: Tensor, listing: Listing, flops: FlopCounterMode) -> Any:
        handle = model[-1].register_forward_pre_hook(lambda *_: listing.seen.append("last layer"))  # type: ignore[index]
        try:
            with listing, flops:
                return model(x)
        finally:
            handle.remove()

    policy = force_recomputing(monkeypatch)
    seen, flops = listed(policy)
    without = Planned(2**40, min_bytes=0, recompute=False)
    assert "gelu" in recomputed(policy)
    expected, expected_flops = listed(without)
    assert flops == expected_flops
    assert [name for name in seen if name not in PACKING] == [name for name in expected if name not in PACKING]


PACKING = {"aten.empty.memory_format", "aten.set_.source_Storage_storage_offset", "aten.detach.default"}


def test_nothing_is_held_and_nothing_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the garbage collector off, over many steps."""
    policy = force_recomputing(monkeypatch)
    model = activations()
    alive: list[int] = []
    gc.collect()
    gc.disable()
    try:
        with keep_saved(model, policy):
            for number in range(60):
                x = batch()
                held = weakref.ref(x.untyped_storage())
                loss = model(x).square().sum()
                del x
                loss.backward()
                del loss
                assert held() is None
                assert policy._counter.total() == 0
                if number % 20 == 19:
                    alive.append(len(policy._op_log._contents))
        assert alive == [0, 0, 0]
        assert "gelu" in recomputed(policy)
        gone = weakref.ref(policy)
        del policy
        assert gone() is None
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_compiled_code_saves_is_never_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes a sum into the result of a convolution, and tells nobody; at first nothing but zeros are added."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 1, bias=False)
            self.shift = nn.Parameter(torch.zeros(1, 8, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) + self.shift)

    def make() -> nn.Module:
        torch._dynamo.reset()
        layers = (nn.Tanh(), nn.Conv2d(8, 8, 1), nn.Sigmoid(), nn.Conv2d(8, 8, 1))
        return nn.Sequential(torch.compile(Shifted()), *layers)

    before = counters["stats"]["unique_graphs"]
    policy = check(monkeypatch, make, on(2, 3, 8, 8), {"sigmoid"})
    assert counters["stats"]["unique_graphs"] == before + 2  # with and without, each compiled once
    for plan in policy.plans:
        assert sum(saved_range.recompute.count("convolution") for saved_range in plan.recording.ranges) <= 1
