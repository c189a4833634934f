"""Which memory a policy is given, once for all tensors in it, and that tensors come back as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.memory.policies.policy import Packed, Policy, Saved
from retrograd.memory.saved.keeping import keep_saved
from tests.memory.saved.test_exactness import Copy


class Noting(Policy):
    """Copies, and what it was asked for."""

    def __init__(self, min_bytes: int = 0) -> None:
        self.min_bytes = min_bytes
        self.seen: list[tuple[int, torch.dtype, tuple[int, ...], str, int]] = []

    def pack(self, saved: Saved) -> Packed | None:
        self.seen.append((saved.nbytes, saved.values.dtype, tuple(saved.shape), saved.path, saved.number))
        return Copy(saved.values.clone())


class SavesAll(torch.autograd.Function):
    """Saves its arguments and hands what comes back to a callback."""

    @staticmethod
    def forward(ctx: Any, see: Callable[[tuple[Tensor, ...]], None], x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        ctx.see = see
        ctx.count = len(others)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.see(ctx.saved_tensors)
        return None, gradient, *[None] * ctx.count


@contextmanager
def coming_back(make: Callable[[], list[Tensor]], policy: Policy) -> Iterator[tuple[Tensor, ...]]:
    """What comes back for tensors that nobody else holds any more."""
    seen: list[tuple[Tensor, ...]] = []
    x = torch.ones(1, requires_grad=True)
    with keep_saved(None, policy):
        loss = SavesAll.apply(seen.append, x, *make())
    loss.backward()
    yield seen[0]


def base() -> Tensor:
    return torch.randn(8, 6, 5, 4, generator=torch.Generator().manual_seed(1))


VIEWS: dict[str, Callable[[], Tensor]] = {
    "contiguous": base,
    "channels_last": lambda: base().to(memory_format=torch.channels_last),
    "transposed": lambda: base().transpose(1, 3),
    "slice": lambda: base()[2:, ::2, 1:4],
    "expanded": lambda: base()[:1].expand(8, 6, 5, 4),
    "from one number": lambda: torch.tensor(3.0).expand(100, 100),
    "overlapping": lambda: base().flatten().unfold(0, 7, 2),
    "as_strided": lambda: base().as_strided((5, 5), (3, 1), 7),
    "one element": lambda: base()[1, 2, 3, 3],
    "small part": lambda: base()[5, 2],
    "empty": lambda: base()[:0],
    "scalar": lambda: torch.tensor(2.5),
    "bfloat16": lambda: base().bfloat16().transpose(0, 1),
    "float8": lambda: base().to(torch.float8_e4m3fn).transpose(0, 1),
    "bool": lambda: (base() > 0)[:, 1:],
    "int64": lambda: (base() * 100).long().transpose(0, 2),
    "complex": lambda: torch.view_as_complex(base().view(8, 6, 10, 2).contiguous()),
    "conjugate": lambda: torch.complex(base(), base() + 1).conj(),
    "negative": lambda: torch.complex(base(), base() + 1).conj().imag,
    "real part": lambda: torch.complex(base(), base() + 1).real,
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_comes_back_as_it_was(name: str) -> None:
    expected = VIEWS[name]()
    with coming_back(lambda: [VIEWS[name]()], Noting()) as (found,):
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert (found.is_conj(), found.is_neg()) == (expected.is_conj(), expected.is_neg())
        assert torch.equal(
            found.float() if found.itemsize == 1 else found, expected.float() if found.itemsize == 1 else expected
        )


def sparse() -> Tensor:
    return base()[0, 0].relu().to_sparse()


OTHERS: dict[str, Callable[[], Tensor]] = {
    "sparse": sparse,
    "csr": lambda: base()[0, 0].relu().to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(base(), 0.1, 0, torch.qint8),
    "meta": lambda: torch.empty(100, 100, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([base()[0, 0], base()[0, 1]], layout=torch.jagged),
    "subclass": lambda: base().as_subclass(Marked),
}


class Marked(Tensor):
    """A subclass."""


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_not_plain_memory_passes_through(name: str) -> None:
    policy = Noting()
    original = OTHERS[name]()
    with coming_back(lambda: [original], policy) as (found,):
        assert type(found) is type(original)
        assert found.layout == original.layout
        assert found.device == original.device
    assert not policy.seen


def test_fake_tensors_pass_through() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    policy = Noting()
    with keep_saved(None, policy), FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        model(torch.randn(2, 4)).sum().backward()
    assert not policy.seen


def test_a_storage_is_given_once_for_all_that_is_saved_of_it() -> None:
    policy = Noting()
    with coming_back(lambda: list((base() * 1).chunk(3, dim=1)), policy) as parts:
        assert len(policy.seen) == 1
        assert policy.seen[0][0] == base().nbytes
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
        assert torch.equal(torch.cat(parts, 1), base())


def test_a_small_part_of_a_large_storage_goes_alone() -> None:
    """One batch of a data set that lies in memory."""
    policy = Noting()
    with coming_back(lambda: [base()[3:5]], policy):
        assert policy.seen[0][0] == base()[3:5].nbytes


def test_an_address_that_is_used_again_is_not_taken_for_the_old_memory() -> None:
    """The allocator hands freed memory out again at once."""
    policy = Noting()
    x = torch.ones(1, requires_grad=True)
    seen: list[tuple[Tensor, ...]] = []
    addresses = set()
    with keep_saved(None, policy):
        loss = x
        for number in range(50):
            values = torch.full((1000,), float(number))
            addresses.add(values.data_ptr())
            loss = SavesAll.apply(seen.append, loss, values)
            del values
    loss.backward()
    assert len(addresses) < 50
    assert [int(values[0]) for (values,) in reversed(seen)] == list(range(50))


def test_memory_that_was_written_to_is_given_again() -> None:
    policy = Noting()
    x = torch.ones(100, requires_grad=True)
    with keep_saved(None, policy):
        y = x * 1.0
        first = y.relu().sum() + 0
        y = torch.relu_(y + 1)
        (first + y.square().sum()).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((100,), 5.0))


# ---- what stays -----------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.scale = nn.Buffer(torch.rand(64, 64))
        self.last = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)) * self.scale.mT
        return self.last(x * self.last.weight[0]) + x @ self.first.weight.view(64, 64)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_parameters_and_buffers_stay_also_transposed_and_cast(everywhere: bool, is_mixed: bool) -> None:
    model, policy = Net(), Noting()
    with keep_saved(None if everywhere else model, policy), torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        x = torch.randn(64, 64)
        model(x).sum().backward()
    held = {tuple(p.shape) for p in (*model.parameters(), *model.buffers())} - {(64, 64), (64,), ()}
    assert not held & {shape for _, _, shape, _, _ in policy.seen}
    activations = 6  # x, and its cast; what the first layer gives; normed; scaled; scaled again …
    assert len([shape for _, _, shape, _, _ in policy.seen if shape == (64, 64)]) <= activations + 3 * is_mixed


@pytest.mark.parametrize("everywhere", [False, True])
def test_views_of_buffers_stay(everywhere: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Buffer(torch.rand(24, 40))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.table.mT[8:]

    model, policy, x = Scaled(), Noting(), torch.randn(5, 32, requires_grad=True)
    with keep_saved(None if everywhere else model, policy):
        model(x).exp().sum().backward()
    assert not {(32, 24), (24, 40), (40, 24)} & {shape for _, _, shape, _, _ in policy.seen}
    assert policy.seen or not everywhere


def test_weights_are_not_given_under_autocast() -> None:
    model, policy = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16)), Noting()
    with keep_saved(model, policy), torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(5, 32)).sum()
    loss.backward()
    assert {shape for _, _, shape, _, _ in policy.seen} == {(5, 32), (5, 48)}


def test_small_memory_stays() -> None:
    policy = Noting(min_bytes=400)
    with coming_back(lambda: [torch.randn(99), torch.randn(100), torch.randn(1).expand(1000)], policy):
        assert [nbytes for nbytes, *_ in policy.seen] == [400]


def test_numbers_are_the_same_in_every_step() -> None:
    policy = Noting()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True))
    with keep_saved(model, policy):
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
    places = [(path, number) for *_, path, number in policy.seen]
    assert places == places[: len(places) // 3] * 3
    assert [number for _, number in places[: len(places) // 3]] == list(range(len(places) // 3))
    assert {path for path, _ in places} == {"0", "1", "3"}
