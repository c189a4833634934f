"""Nothing piles up while a recording runs, nothing lives longer for it, and nothing is left when it has ended."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import retrograd as rg
from retrograd.core.hooks import in_graphs
from retrograd.core.hooks.compiled import compiled_call_listeners
from retrograd.core.hooks.nested import flatten
from retrograd.core.limits import LIMITS
from retrograd.core.recording.record import Recording
from retrograd.core.recording.recorder import Recorder
from retrograd.core.recording.settings import Settings
from tests.scenarios import Trial, build

PACKAGE = str(Path(rg.__file__).parent)

EVERYTHING: dict[str, Any] = {"sites": ["*"]}
RING: dict[str, Any] = {"statistics": False, "tensors": rg.Keep("*", last=1)}


def total(tensor: Tensor) -> Tensor:
    return tensor.abs().float().sum()


OWN: dict[str, Any] = {"sites": ["*"], "statistics": [total]}


class Nowhere:
    """A sink that keeps nothing, so that what grows is the recorder's."""

    def describe(self, **facts: Any) -> None: ...
    def add_sites(self, names: Any) -> None: ...
    def add_rows(self, batch: Any) -> None: ...
    def add_event(self, event: Any) -> None: ...
    def add_tensor(self, kept: Any) -> None: ...
    def flush(self) -> None: ...
    def close(self, status: str = "finished") -> None: ...


def recording(models: Any, **choices: Any) -> Recording:
    sink = Nowhere()
    return Recording(Recorder(models, sink, Settings(**choices)), sink, None)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts that are handed over many at a time, or after a while, are handed over one by one."""
    monkeypatch.setattr(LIMITS, "facts_at_once", 1)
    monkeypatch.setattr(LIMITS, "facts_at_once", 1)


# ---- growth ---------------------------------------------------------------------------------------------------

GROWING = [
    "mlp",
    "residual_convolutions",
    "views_in_place",
    "nested_outputs",
    "lstm_cell",
    "transformer_encoder",
    "checkpoint_reentrant",
    "checkpoint_not_reentrant",
    "loss_scaling",
    "gan",
    "accumulation_and_clipping",
    "gradient_penalty",
    "updates_by_hand",
]


WARM_UP = 12


def population() -> tuple[Counter[str], int]:
    """Objects that the collector knows, by type, and live tensors."""
    objects = gc.get_objects()
    kinds = Counter(type(each).__qualname__ for each in objects if type(each) is not Counter)
    return kinds, sum(issubclass(type(each), Tensor) for each in objects)


Growth = tuple[Counter[str], int]


def growth(name: str, choices: dict[str, Any] | None, steps: int = 56) -> Growth:
    """What there is more after so many steps than after a few; neither ends with one that is looked at."""
    run = build(name)
    with recording(run.models, **choices) if choices is not None else nullcontext():
        train(run, WARM_UP)
        before, tensors = population()
        train(run, steps)
        after, more_tensors = population()
    return after - before, more_tensors - tensors


def train(run: Trial, steps: int) -> None:
    for number in range(steps):
        run.train_step(number)
        if number % 4 == 0:
            run.assess()


_bare_growth: dict[str, Growth] = {}


@pytest.mark.slow
@pytest.mark.usefixtures("no_collector", "nothing_waits")
@pytest.mark.parametrize(
    ("name", "choices"),
    [(name, EVERYTHING) for name in GROWING] + [(name, choices) for name in ("mlp", "gan") for choices in (RING, OWN)],
)
def test_nothing_piles_up(name: str, choices: dict[str, Any]) -> None:
    if name not in _bare_growth:
        _bare_growth[name] = growth(name, None)
    more_without_us, tensors_without_us = _bare_growth[name]
    for _ in range(3):  # Python fills caches of its own now and then
        more, tensors = growth(name, choices)
        if tensors <= tensors_without_us and not more - more_without_us:
            return
    raise AssertionError(f"{tensors} more tensors, {more - more_without_us}")


def test_piling_up_would_be_seen() -> None:
    kept: list[Tensor] = []
    before, tensors = population()
    kept.append(torch.ones(1))
    after, more_tensors = population()
    assert more_tensors == tensors + 1
    assert (after - before)["Tensor"] == 1


# ---- lifetimes ------------------------------------------------------------------------------------------------

LIVES = [
    "mlp",
    "residual_convolutions",
    "shared_modules",
    "attention",
    "lstm_cell",
    "checkpoint_not_reentrant",
    "checkpoint_reentrant",
    "gan",
    "nested_outputs",
    "gradient_penalty",
    "two_passes_over_one_graph",
]


class Lives:
    """Writes down, at every hook point, which activations and gradients are in memory."""

    def __init__(self) -> None:
        self.known: list[tuple[str, StorageWeakRef]] = []
        self.log: list[tuple[str, list[str]]] = []

    def born(self, name: str, tensor: Tensor) -> None:
        self.known.append((f"{name} {len(self.known)}", StorageWeakRef(tensor.untyped_storage())))

    def look(self, when: str) -> None:
        self.known = [item for item in self.known if not item[1].expired()]
        self.log.append((when, [name for name, _ in self.known]))

    def watch(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            module.register_forward_hook(self.after(name))

    def after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for _, tensor in flatten(output, ()):
                self.born(name, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(see)
            self.look(f"forward {name}")

        def see(gradient: Tensor) -> None:
            self.look(f"before backward {name}")
            self.born(f"gradient {name}", gradient)
            self.look(f"backward {name}")

        return hook


def lives(name: str, choices: dict[str, Any] | None) -> list[tuple[str, list[str]]]:
    run = build(name)
    seen = Lives()
    for model in run.modules.values():
        seen.watch(model)
    with recording(run.models, **choices) if choices is not None else nullcontext():
        for number in range(2):
            run.train_step(number)
            seen.look("after a step")
            run.assess()
            seen.look("after an evaluation")
    return seen.log


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("choices", [{}, EVERYTHING, OWN], ids=["default", "everything", "own statistic"])
@pytest.mark.parametrize("name", LIVES)
def test_nothing_lives_longer(name: str, choices: dict[str, Any]) -> None:
    """The storage of every activation and gradient is freed where it would be without us."""
    assert lives(name, choices) == lives(name, None)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("backward", [True, False])
def test_a_deep_graph_lives_no_longer(backward: bool) -> None:
    """More calls than those from which on graphs are kept from crashing when they are freed."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(500)))
    with recording(model):
        for _ in range(3):
            out = model(torch.ones(1, 2))
            storage = StorageWeakRef(out.untyped_storage())
            if backward:
                out.sum().backward(retain_graph=True)
            del out
            assert storage.expired()


# ---- after the end --------------------------------------------------------------------------------------------


@contextmanager
def ours_running() -> Iterator[list[str]]:
    """Names of our functions that run meanwhile."""
    names: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            names.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        yield names
    finally:
        sys.setprofile(None)


def hooks_of(model: nn.Module) -> list[Any]:
    """Every table of hooks that modules and parameters have."""
    tables = [
        (name, key, list(value.items()))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if "hooks" in key and isinstance(value, dict)
    ]
    for name, parameter in model.named_parameters():
        for key in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            tables.append((name, key, list((getattr(parameter, key) or {}).items())))
    return tables


def step(model: nn.Module, x: Tensor, *, update: bool = True) -> Tensor:
    """One training step, or without the update, so that the graph can be used again."""
    loss = model(x).square().mean()
    loss.backward(retain_graph=not update)
    if update:
        torch.optim.SGD(model.parameters(), lr=0.01).step()
    return loss


@pytest.mark.parametrize("name", ["mlp", "residual_convolutions", "shared_modules", "lstm_cell", "attention"])
@pytest.mark.parametrize("choices", [{}, EVERYTHING, RING], ids=["default", "everything", "ring"])
def test_no_code_of_ours_runs_afterwards(name: str, choices: dict[str, Any]) -> None:
    """Not on the last graph, which was kept, nor on new ones."""
    run = build(name)
    (model,) = run.modules.values()
    before = hooks_of(model)
    with rg.record(model, **choices):
        for number in range(2):
            run.train_step(number)
        x = {"mlp": (5, 6), "residual_convolutions": (2, 1, 8, 8), "shared_modules": (4, 5), "lstm_cell": (2, 6, 3)}
        leaf = torch.randn(x.get(name, (2, 5, 8)), requires_grad=True)
        kept = step(model, leaf, update=False)
    assert hooks_of(model) == before
    assert not leaf._backward_hooks
    scaler = torch.amp.GradScaler("cpu")
    with ours_running() as names:
        kept.backward()
        scaler.scale(model(leaf).sum()).backward()
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.01))
        run.train_step(3)
        run.assess()
    assert names == []


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("choices", [{}, EVERYTHING, RING], ids=["default", "everything", "ring"])
def test_nothing_watches_compiled_calls_after_an_eager_recording(choices: dict[str, Any]) -> None:
    """Nor before the collector runs, where the part of the house that compiled code needs has been loaded."""
    in_graphs.load()
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with rg.record(model, **choices):
        step(model, torch.ones(2, 3))
    assert not compiled_call_listeners.all


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.fails == "forward":
            raise ValueError(self.fails)
        if self.fails == "interrupt":
            raise KeyboardInterrupt
        if self.fails == "backward":
            x.register_hook(self.fail)
        return self.second(x)

    def fail(self, gradient: Tensor) -> None:
        raise ValueError(self.fails)


@pytest.mark.parametrize("fails", ["forward", "interrupt", "backward", "after"])
@pytest.mark.parametrize("choices", [{}, EVERYTHING], ids=["default", "everything"])
def test_after_an_exception(fails: str, choices: dict[str, Any]) -> None:
    model = Failing()
    before = hooks_of(model)
    x = torch.ones(2, 3)
    with pytest.raises((ValueError, KeyboardInterrupt)), rg.record(model, **choices):
        step(model, x)
        model.fails = fails
        step(model, x)
        raise ValueError
    model.fails = ""
    assert hooks_of(model) == before
    with ours_running() as names:
        step(model, x)
    assert names == []


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_exceptions_leave_no_graph_in_memory(fails: str) -> None:
    model = Failing()
    x = torch.ones(2, 3)

    def attempt(fails: str) -> None:
        model.fails = fails
        with suppress(ValueError):
            step(model, x)

    with recording(model, **EVERYTHING):
        for _ in range(3):
            attempt("")
            attempt(fails)
        attempt("")
        before = population()
        for _ in range(20):
            attempt("")
            attempt(fails)
        attempt("")
        more, tensors = population()
    assert tensors <= before[1]
    assert more["InputGradient"] <= before[0]["InputGradient"]


def test_a_recording_itself_can_be_freed() -> None:
    model = nn.Linear(3, 3)
    with rg.record(model, **EVERYTHING) as recorded:
        kept = step(model, torch.ones(2, 3), update=False)
    recorder = weakref.ref(recorded._recorder)
    del recorded
    gc.collect()
    assert recorder() is None
    kept.backward()


# ---- the user's own hooks -------------------------------------------------------------------------------------


class Hooked:
    """A net with hooks of every kind that write down their names."""

    def __init__(self) -> None:
        warnings.filterwarnings("ignore", "Full backward hook is firing|None of the inputs")  # torch's, of such hooks
        torch.manual_seed(1)
        self.log: list[str] = []
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 1))
        for name, module in self.model.named_modules():
            module.register_forward_pre_hook(self.write(f"pre {name}"))
            module.register_forward_hook(self.write(f"forward {name}"))
            module.register_forward_hook(self.hook_output(name))
            module.register_full_backward_pre_hook(self.write(f"backward pre {name}"))
            module.register_full_backward_hook(self.write(f"backward {name}"))
        for name, parameter in self.model.named_parameters():
            parameter.register_hook(self.write(f"gradient {name}"))
            parameter.register_post_accumulate_grad_hook(self.write(f"accumulated {name}"))
        self.update = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.update.register_step_pre_hook(self.write("before step"))
        self.update.register_step_post_hook(self.write("after step"))

    def write(self, name: str) -> Callable[..., None]:
        return lambda *_: self.log.append(name)

    def hook_output(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(self.write(f"output {name}"))
                output.retain_grad()

        return hook

    def train(self) -> list[Tensor]:
        for _ in range(2):
            self.update.zero_grad()
            out = self.model(torch.randn(2, 3))
            out.register_hook(self.write("late"))
            out.grad_fn.register_prehook(self.write("node pre"))
            out.grad_fn.register_hook(self.write("node post"))
            out.square().mean().backward()
            self.update.step()
        return [parameter.detach() for parameter in self.model.parameters()]


@pytest.mark.parametrize("choices", [{}, EVERYTHING, RING], ids=["default", "everything", "ring"])
def test_the_users_hooks_fire_in_the_same_order(choices: dict[str, Any]) -> None:
    bare, recorded = Hooked(), Hooked()
    torch.manual_seed(2)
    expected = bare.train()
    before = hooks_of(recorded.model)
    torch.manual_seed(2)
    with rg.record(recorded.model, **choices):
        weights = recorded.train()
    assert recorded.log == bare.log
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
    assert [(name, key, len(items)) for name, key, items in hooks_of(recorded.model)] == [
        (name, key, len(items)) for name, key, items in before
    ]


def test_a_hook_set_later_on_a_recorded_tensor_works_and_is_not_kept() -> None:
    class Hook:
        calls = 0

        def __call__(self, gradient: Tensor) -> Tensor:
            self.calls += 1
            return gradient * 2

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with rg.record(model):
        hook = Hook()
        out = model(torch.ones(2, 3))
        handle = out.register_hook(hook)
        out.sum().backward(retain_graph=True)
        assert hook.calls == 1
        handle.remove()
        out.sum().backward(retain_graph=True)
        assert hook.calls == 1
        out.register_hook(hook)
        gone = weakref.ref(hook)
        del out, hook
        assert gone() is None


def test_a_hook_that_changes_the_output_before_ours_is_seen() -> None:
    model = nn.Linear(3, 3)
    model.register_forward_hook(lambda module, args, output: output * 0)
    with rg.record(model) as recorded:
        step(model, torch.ones(2, 3))
    assert recorded.history["self:output"].abs_max.tolist() == [0]


# ---- several recordings ---------------------------------------------------------------------------------------


def rows(recorded: Any) -> dict[str, list[float]]:
    history = recorded.history
    return {site: history[site].rms.tolist() for site in history.sites}


def trained(*, outer: bool, inner: bool, crossed: bool = False) -> list[dict[str, list[float]]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    first = rg.record(model, **EVERYTHING) if outer else None
    second = rg.record(model, sites="2:*") if inner else None
    for _ in range(3):
        step(model, torch.randn(4, 3))
    seen = [rows(each) for each in (first, second) if each is not None]
    for each in (first, second) if crossed else (second, first):
        if each is not None:
            each.close()
    assert not any(items for _, _, items in hooks_of(model))
    return seen


@pytest.mark.parametrize("crossed", [False, True])
def test_two_recordings_of_one_model(crossed: bool) -> None:
    """Each sees what it sees alone, whichever ends first."""
    both = trained(outer=True, inner=True, crossed=crossed)
    assert both == trained(outer=True, inner=False) + trained(outer=False, inner=True)


def test_the_one_that_stays_goes_on() -> None:
    model = nn.Linear(3, 3)
    with rg.record(model) as outer:
        with rg.record(model) as inner:
            step(model, torch.ones(2, 3))
        step(model, torch.ones(2, 3))
    assert inner.history["self:output.grad"].steps.tolist() == [0]
    assert outer.history["self:output.grad"].steps.tolist() == [0, 1]


def test_a_graph_of_an_earlier_recording_is_none_of_the_next_ones_business() -> None:
    model = nn.Linear(3, 3)
    x = torch.ones(2, 3)
    before = model(x).sum()
    with rg.record(model, sites="*:output*") as first:
        old = model(x).sum()
        old.backward(retain_graph=True)
    with rg.record(model, sites="*:output*") as second:
        old.backward()
        before.backward()
    assert first.history["self:output.grad"].count.tolist() == [6]
    assert "self:output.grad" not in second.history.sites


# ---- copies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copy_", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copied_model_is_not_recorded_and_needs_us_no_more(copy_: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    with rg.record(model, **EVERYTHING) as recorded:
        step(model, torch.ones(2, 3))
        twin = copy_(model)
        with ours_running() as names:
            twin(torch.ones(2, 3)).sum().backward()
        assert not [name for name in names if {"see", "after", "before"} & {*name.split("_")}]
    assert recorded.history["0:output"].steps.tolist() == [0]
    assert torch.equal(twin[0].weight, model[0].weight)


def test_a_recording_of_compiled_code_leaves_pickling_alone() -> None:
    """Its hooks stay, since torch would compile the model anew without them; pickles of the model are free of them."""
    import copyreg
    import pickle
    from collections import OrderedDict

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    with rg.record(compiled):
        compiled(torch.ones(1, 2)).sum().backward()
    assert any(module._forward_hooks for module in model.modules())
    assert OrderedDict not in copyreg.dispatch_table
    assert not any(module._forward_hooks for module in pickle.loads(pickle.dumps(model)).modules())


def test_torchs_own_check_for_leaked_modes_passes_where_the_recording_ends_within_the_test() -> None:
    before = torch._C._len_torch_function_stack()
    net = nn.Linear(2, 2)
    with rg.record(net):
        net(torch.ones(1, 2)).sum().backward()
        net(torch.ones(1, 2))
    assert torch._C._len_torch_function_stack() == before
