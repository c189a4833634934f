"""A forward that is run again draws the same from Python and NumPy; where it is not the same again, it raises."""

# ruff: noqa: NPY002  # the generators that all of a process shares are what this is about

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from retrograd.core.errors import RecomputeError
from retrograd.core.hooks.saved import is_plain
from retrograd.memory.policies import recompute
from retrograd.memory.policies.overwriting import SaveSite
from retrograd.memory.policies.recompute import LateComparison, Recompute, _take_vector, take_sample
from retrograd.memory.saved.keeping import keep_saved

Draw = Callable[[int], tuple[float, list[int]]]
"""A number, and an order of so many rows."""


def draw_by_python(rows: int) -> tuple[float, list[int]]:
    return random.betavariate(1, 1) + random.gauss(0, 1), random.sample(range(rows), rows)


def draw_by_numpy(rows: int) -> tuple[float, list[int]]:
    return float(np.random.beta(1, 1)), np.random.permutation(rows).tolist()


def draw_one_normal_number(rows: int) -> tuple[float, list[int]]:
    """NumPy draws two, and keeps one for the next call, which then takes no bits."""
    return float(np.random.normal()), list(range(rows))[::-1]


def draw_by_both(rows: int) -> tuple[float, list[int]]:
    return draw_by_python(rows)[0], draw_by_numpy(rows)[1]


class Mixed(nn.Module):
    """Rows are mixed with other rows, as in mixup."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw
        self.first, self.dropout, self.last = nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        share, order = self.draw(len(x))
        hidden = self.first(x)
        hidden = share * hidden + (1 - share) * hidden[order]
        return self.last(self.dropout(hidden.tanh())).sin()


def states() -> list[Any]:
    return [random.getstate(), [str(each) for each in np.random.get_state()], torch.get_rng_state().tolist()]


def train(make: Callable[[], nn.Module], policy: Recompute | None, *, backwards: int = 1) -> tuple[list[Tensor], Any]:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    model = nn.Sequential(*(make() for _ in range(3)))
    gradients = []
    with nullcontext() if policy is None else keep_saved(model, {"?": policy}):
        for _ in range(3):
            loss = model(torch.randn(8, 6)).square().mean()
            for left in reversed(range(backwards)):
                random.random(), np.random.normal()  # the program draws between them too
                loss.backward(retain_graph=left > 0)
            gradients += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return gradients, states()


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("draw", [draw_by_python, draw_by_numpy, draw_one_normal_number, draw_by_both])
def test_numbers_of_python_and_numpy_are_drawn_again(draw: Draw, backwards: int) -> None:
    found, left = train(lambda: Mixed(draw), Recompute(), backwards=backwards)
    expected, plain = train(lambda: Mixed(draw), None, backwards=backwards)
    assert len(found) == len(expected) == 36
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert left == plain


def test_in_another_thread() -> None:
    expected, _ = train(lambda: Mixed(draw_by_both), None)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(train(lambda: Mixed(draw_by_both), Recompute())[0]))
    thread.start()
    thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_an_error_in_the_second_run_leaves_the_generators() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            x = x * random.random() + np.random.random()
            if self.runs == 2:
                raise ValueError("the second time")
            return x.sin()

    model = Failing()
    with keep_saved(model, Recompute()):
        output = model(torch.ones(3, requires_grad=True))
        before = states()[:2]
        with pytest.raises(ValueError, match="the second time"):
            output.sum().backward()
    assert states()[:2] == before


def test_generators_that_the_forward_leaves_alone_are_left_alone() -> None:
    """A thread that loads data draws from them meanwhile, and must not draw the same twice."""

    class Meanwhile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            if self.runs == 2:
                random.random(), np.random.random()
            return x.sin().cos()

    model = Meanwhile()
    with keep_saved(model, Recompute()):
        output = model(torch.ones(3, requires_grad=True))
        random.seed(5), np.random.seed(5)
        output.sum().backward()
    found = random.random(), np.random.random()
    random.seed(5), np.random.seed(5)
    random.random(), np.random.random()
    assert found == (random.random(), np.random.random())


# ---- what is not the same again ---------------------------------------------------------------------------------


class Masked(nn.Module):
    """A mask is the last thing that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.generator = nn.Parameter(torch.ones(6)), torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (torch.rand(x.shape, generator=self.generator) > 0.5).float()


class Deep(nn.Module):
    """Some layers after something that is not the same each time."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.change = nn.Linear(6, 6), nn.Linear(6, 6), change

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(self.first(x)).tanh())


class Counted(Deep):
    """A buffer is read and written."""

    def __init__(self) -> None:
        super().__init__(self.scale)
        self.register_buffer("count", torch.zeros(()))

    def scale(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


def draw_by(generator: Any) -> float:
    return float(torch.rand((), generator=generator) if isinstance(generator, torch.Generator) else generator.random())


def by(generator: Any) -> nn.Module:
    return Deep(lambda x: x * draw_by(generator))


def counting(change: Callable[[Tensor, int], Tensor]) -> nn.Module:
    """A change that is told how often it was asked before."""
    count = itertools.count()
    return Deep(lambda x: change(x, next(count)))


OTHER = "other values than in the forward"
NOT_THE_SAME: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a generator of torch's": (lambda: by(torch.Generator().manual_seed(1)), OTHER),
    "a generator of NumPy's": (lambda: by(np.random.default_rng(1)), OTHER),
    "a generator of Python's": (lambda: by(random.Random(1)), OTHER),
    "a counter": (lambda: counting(lambda x, n: x * (n + 1)), OTHER),
    "one row of many": (lambda: counting(lambda x, n: x.index_fill(0, torch.tensor([n % 2]), 0.0)), OTHER),
    "a mask": (Masked, OTHER),
    "a buffer": (Counted, OTHER),
    "another shape": (lambda: counting(lambda x, n: x[: 4 + n]), "different metadata"),
    "fewer tensors": (lambda: counting(lambda x, n: x if n else x.sin().cos().exp()), "different number of tensors"),
}


@pytest.mark.parametrize("name", NOT_THE_SAME)
def test_what_is_not_the_same_again_is_refused(name: str) -> None:
    make, match = NOT_THE_SAME[name]
    model = make()
    with keep_saved(model, Recompute()):
        output = model(torch.randn(8, 6))
        with pytest.raises(RecomputeError, match=match) as raised:
            output.sum().backward()
    assert "self (" in str(raised.value)


def test_an_argument_given_by_name_that_has_been_written_to() -> None:
    class Gained(nn.Module):
        def forward(self, x: Tensor, *, gain: Tensor) -> Tensor:
            return (x + gain).sin()

    model, gain = Gained(), torch.ones(6)
    with keep_saved(model, Recompute()):
        output = model(torch.randn(8, 6, requires_grad=True), gain=gain)
        gain.zero_()
        with pytest.raises(RecomputeError):
            output.sum().backward()


def test_what_is_like_the_first_time_but_for_rounding_is_the_same() -> None:
    """On a device sums are not added up in the same order twice."""
    factors = itertools.cycle([1.0, 1.0 + 1e-6])
    model = Deep(lambda x: x * next(factors))
    with keep_saved(model, Recompute()):
        model(torch.randn(8, 6)).sum().backward()


def test_values_that_are_not_finite_are_not_told_apart() -> None:
    model = Deep(lambda x: x / torch.zeros(6))
    with keep_saved(model, Recompute()):
        model(torch.randn(8, 6)).sum().backward()


def test_running_statistics_are_not_compared() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
    with keep_saved(model, Recompute()):
        for _ in range(3):
            model(torch.randn(8, 6)).sum().backward()


def test_noise_that_torch_saves_before_it_is_drawn() -> None:
    def gradient(policy: Recompute | None) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.RReLU())
        with nullcontext() if policy is None else keep_saved(model, policy):
            output = model(torch.randn(32, 64))
            memory = [torch.full((32 * 64,), 7.0) for _ in range(20)]
            del memory  # what is allocated next is not by chance what it was
            output.sum().backward()
        assert model[0].weight.grad is not None
        return model[0].weight.grad

    assert torch.equal(gradient(Recompute()), gradient(None))


# ---- the samples ------------------------------------------------------------------------------------------------

TENSORS = {
    "scalar": torch.tensor(3.0),
    "few": torch.arange(5),
    "vector": torch.randn(17),
    "transposed": torch.randn(9, 31).t(),
    "slices": torch.randn(40, 60)[::2, 3:],
    "broadcast": torch.randn(6, 1).expand(6, 50),
    "channels last": torch.randn(2, 8, 5, 5).contiguous(memory_format=torch.channels_last),
    "complex": torch.randn(5, 7, dtype=torch.complex64).conj(),
    "mask": torch.rand(9, 9) > 0.5,
    "half": torch.randn(100).to(torch.bfloat16),
}


@pytest.mark.parametrize("take", [take_sample, lambda tensor: _take_vector(tensor).tolist()], ids=["cpu", "device"])
@pytest.mark.parametrize("name", TENSORS)
def test_a_sample_is_made_of_elements(name: str, take: Callable[[Tensor], list[Any]]) -> None:
    tensor = TENSORS[name]
    assert is_plain(tensor)
    sample = tree_leaves(take(tensor))
    assert 12 <= len(sample) <= 16 or len(sample) == tensor.numel()
    if tensor.is_complex() and not isinstance(sample[0], complex):
        tensor = torch.view_as_real(tensor.conj().resolve_conj())
    values = tensor.flatten().tolist()
    assert set(sample) <= set(values)
    assert len(set(sample)) >= min(len(set(values)), 4)


def test_a_sample_of_nothing() -> None:
    assert take_sample(torch.empty(0, 3)) is None


class Event:
    """Of a device that answers when it is told to."""

    is_over = False

    def query(self) -> bool:
        return Event.is_over

    def synchronize(self) -> None:
        Event.is_over = True


class Stream:
    def record_event(self) -> Event:
        return Event()


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    Event.is_over = False
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(recompute, "_allocate", lambda count: torch.empty(count, dtype=torch.bool))


@pytest.mark.usefixtures("device")
def test_on_a_device_nothing_is_waited_for() -> None:
    late, one = LateComparison(), torch.ones(16, dtype=torch.float64)
    good, bad = SaveSite("good"), SaveSite("bad")
    for number in range(100):
        is_bad = number == 40
        assert late.note(one, one * (2 if is_bad else 1), torch.float32, bad if is_bad else good) is None
    Event.is_over = True
    assert late.note(one, one, torch.float32, good) is bad
    assert late.end() is None


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("factor", "expected"), [(1 + 1e-6, None), (1.01, SaveSite("block"))])
def test_what_is_left_is_compared_at_the_end(factor: float, expected: SaveSite | None) -> None:
    late, one = LateComparison(), torch.ones(16, dtype=torch.float64)
    assert late.note(one, one * factor, torch.float32, SaveSite("block")) is None
    assert late.end() == expected
