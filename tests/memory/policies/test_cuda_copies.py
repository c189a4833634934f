"""Copies of a device, by which access to memory is put before which. Torch's streams are replaced: no device is needed.

Memory that is freed goes to the next kernel of the stream that it was allocated on, at once; so each test does with it
what such a kernel would.
"""

from __future__ import annotations

import mmap
import random
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from retrograd.memory.budget import offloader
from retrograd.memory.budget.offloader import HostBackend
from retrograd.memory.budget.planned import Planned
from retrograd.memory.policies.cpu import Cpu, HostOffloader, Offloaded
from retrograd.memory.policies.cuda_copies import CudaCopies, CudaCopy
from retrograd.memory.saved.keeping import keep_saved
from tests.memory.policies.stream_order import Device, Stream

DEVICE = torch.device("cpu")


class Copies(CudaCopies):
    """Without pinned memory; and now and then the device has no memory.

    The host's is kept, so that no address is the host's first and then the device's.
    """

    chance: random.Random | None = None
    host: ClassVar[list[Tensor]] = []

    def allocate(self, nbytes: int) -> Tensor:
        self.host.append(torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8))
        return self.host[-1]

    def copy_in(
        self, buffer: Tensor, like: Tensor, numel: int, out: CudaCopy, *, is_urgent: bool
    ) -> tuple[Tensor, CudaCopy]:
        if self.chance is not None and self.chance.random() < 0.3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().copy_in(buffer, like, numel, out, is_urgent=is_urgent)


def test_a_race_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    tensor, beside = torch.zeros(8), Stream("beside")
    device.use(tensor)
    with device.on(beside):
        device.use(torch.zeros(1), tensor)
    assert len(device.races()) == 1
    beside.wait_stream(device.current)
    with device.on(beside):
        device.use(torch.zeros(1), tensor)
    assert len(device.races()) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 6000), st.booleans(), st.integers(0, 1000))
def test_one_computing_stream_never_meets_a_copy(window: int, is_scarce: bool, seed: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = Device(monkeypatch)
        copies = Copies(DEVICE)
        offloader = HostOffloader(copies, window)
        chance = random.Random(seed)
        copies.chance = chance if is_scarce else None
        keep: list[Tensor] = []  # so that no address is used by two tensors of this test
        for _ in range(3):
            _run_pass(device, offloader, chance, keep)
        assert not device.races()
        assert not device.lent


def _run_pass(device: Device, offloader: HostOffloader, chance: random.Random, keep: list[Tensor]) -> None:
    packed, memory, freed = [], [], set()
    with device:
        for number in range(6):
            values = torch.full((500,), float(number))
            keep.append(values)
            memory.append(values)
            device.use(values)
            packed.append(offloader.add(values))
            for other, one in enumerate(packed):
                if isinstance(one, Offloaded) and one.values is None and other not in freed:
                    freed.add(other)
                    device.use(memory[other])  # the next layer's output lies there
        order = list(range(5, chance.choice([-1, 2]), -1))
        if chance.random() < 0.5:
            chance.shuffle(order)
        for number in order:
            one = packed[number]
            assert one is not None
            keep += [each.arriving[0] for each in packed if isinstance(each, Offloaded) and each.arriving is not None]
            try:
                values = one.restore()
            except torch.OutOfMemoryError:
                continue
            keep.append(values)
            device.use(torch.zeros(1), values)
            packed[number] = None
            del one
            device.use(values)  # freed, and used again


@pytest.mark.parametrize("share", [0.45, 0.6])
@pytest.mark.parametrize("is_scarce", [False, True])
def test_a_whole_plan_never_meets_a_copy(share: float, is_scarce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training under a budget: each kernel of the forward, of the backward and of what is run again counts."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())))
    batch = torch.randn(128, 64)
    expected = gradients(model, batch)
    device, copies = Device(monkeypatch), Copies(DEVICE)
    monkeypatch.setattr(offloader, "DiskBackend", lambda folder, window: HostBackend(copies))
    policy = Planned(share, min_bytes=1024)
    with device, keep_saved(None, policy):
        for number in range(5):
            copies.chance = random.Random(number) if is_scarce and number > 1 else None
            try:
                found = gradients(model, batch)
            except torch.OutOfMemoryError:
                continue
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert policy.plan is not None
        assert policy.plan.choices.count("offload") > 2
    assert len({access.stream for access in device.accesses}) > 2
    assert not device.races()


def test_what_is_asked_for_now_does_not_queue_behind_what_is_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    offloader = HostOffloader(Copies(DEVICE), window=0)
    memory = [torch.full((500,), float(number)) for number in range(4)]
    with device:
        packed = [offloader.add(values) for values in memory]
        ahead, urgent = packed[0], packed[1]
        assert isinstance(ahead, Offloaded)
        assert isinstance(urgent, Offloaded)
        ahead.fetch()
        ahead_copy = device.accesses[-1]
        begun = len(device.accesses)
        urgent.restore()
        (urgent_copy,) = [
            access for access in device.accesses[begun:] if access.is_write and access.stream != device.current.name
        ][:1]
        assert ahead_copy.stream != urgent_copy.stream
        assert not ahead_copy.is_before(urgent_copy)
        device.use(torch.zeros(1), ahead.restore())
    assert not device.races()


def test_what_one_stream_fetched_another_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    offloader = HostOffloader(Copies(DEVICE), window=0)
    home, other = device.current, Stream("other")
    memory = [torch.full((500,), float(number)) for number in range(2)]
    with device:
        packed = []
        for values in memory:
            device.use(values)
            packed.append(offloader.add(values))
        first, second = packed
        assert isinstance(first, Offloaded)
        assert isinstance(second, Offloaded)
        first.fetch()
        assert first.arriving is not None
        fetched = first.arriving[0]
        with device.on(other):
            values = first.restore()
            assert values is fetched
            device.use(torch.zeros(1), values)
        assert (values.data_ptr(), "other") in device.lent
        with device.on(other):
            second.leave()
        device.current = home
        device.use(memory[1])  # freed memory is used again on the stream that allocated it
    assert not device.races()


def test_what_is_dropped_elsewhere_is_waited_for_where_its_memory_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)
    offloader = HostOffloader(Copies(DEVICE), window=0)
    values = [torch.full((500,), float(number)) for number in range(2)]
    with device:
        packed = [offloader.add(one) for one in values]
        first = packed[0]
        assert isinstance(first, Offloaded)
        first.fetch()
        assert first.arriving is not None
        arriving = first.arriving[0]
        with device.on(Stream("another")):
            del first, packed
        device.use(arriving)
        device.use(values[1])
    assert not device.races()


def test_a_copy_back_follows_the_copy_out_whoever_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    offloader = HostOffloader(Copies(DEVICE), window=0)
    memory = [torch.full((500,), float(number)) for number in range(2)]
    with device:
        packed = [offloader.add(values) for values in memory]
        assert packed[0] is not None
        with device.on(Stream("third")):
            device.use(torch.zeros(1), packed[0].restore())
    assert not device.races()


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_buffer_that_another_stream_has_read_is_not_overwritten(
    is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    offloader = HostOffloader(Copies(DEVICE), window=0)
    memory = [torch.full((500,), float(number)) for number in range(3)]
    with device:
        packed = [offloader.add(values) for values in memory[:2]]
        assert isinstance(packed[0], Offloaded)
        if is_ahead:
            packed[0].fetch()
        device.use(torch.zeros(1), packed[0].restore())
        del packed  # its buffer is free, when the copy from it is done
        with device.on(Stream("other")):
            offloader.add(memory[2])
    assert not device.races()


def test_what_torch_keeps_for_others_goes_before_pinned_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    copies = CudaCopies(DEVICE)
    cached = [3]

    def pin(*args: object, **kwargs: object) -> Tensor:
        if cached:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return torch.zeros(1)

    monkeypatch.setattr(torch, "empty", pin)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", cached.clear, raising=False)  # older torch has none
    assert copies.allocate(100).numel() == 1
    cached.append(1)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: None, raising=False)
    with pytest.raises(torch.AcceleratorError):
        copies.allocate(100)


def test_pinned_memory_is_the_hosts_whatever_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own ``torch.empty`` refuses to pin memory of another device."""
    with torch.device("meta"):
        torch.empty(1)  # torch notes which functions take a device when it is first asked: not what is patched below
    seen = {}
    Device(monkeypatch)
    copies = CudaCopies(DEVICE)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: seen.update(kwargs) or empty(1))
    with torch.device("meta"):
        copies.allocate(100)
    assert seen["device"] == "cpu"
    assert seen["pin_memory"]


# ---- on a device ------------------------------------------------------------------------------------------------


def make_layers() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [part for _ in range(12) for part in (nn.Linear(512, 512), nn.Tanh())]
    return nn.Sequential(*layers).cuda(), torch.randn(2048, 512, device="cuda")


def gradients(model: nn.Module, batch: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    model(batch).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("is_beside", [False, True])
def test_gradients_are_the_same_on_any_stream(is_beside: bool) -> None:
    model, batch = make_layers()
    expected = gradients(model, batch)
    torch.cuda.synchronize()
    with (
        keep_saved(model, Cpu(window=8 << 20, min_bytes=1 << 16)),
        torch.cuda.stream(torch.cuda.Stream() if is_beside else torch.cuda.current_stream()),
    ):
        for _ in range(10):
            found = gradients(model, batch)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_nothing_is_waited_for_and_memory_is_pinned_in_the_first_steps_alone() -> None:
    model, batch = make_layers()
    with keep_saved(model, Cpu(window=8 << 20, min_bytes=1 << 16)) as handle:
        for _ in range(3):
            gradients(model, batch)
        pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                gradients(model, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.host_memory_stats()["num_host_alloc"] == pinned
        (account,) = handle.accounts.values()
        assert account.stretches >= 6 * 10


@pytest.mark.gpu
def test_pinned_memory_takes_little_more_than_what_is_in_it() -> None:
    copies = CudaCopies(torch.device("cuda"))
    offloader = HostOffloader(copies, window=0)
    getattr(torch.accelerator, "empty_host_cache", getattr(torch._C, "_host_emptyCache", None))()  # newest, torch 2.11
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    packed = [offloader.add(torch.ones(49 << 16, device="cuda")) for _ in range(40)]  # 0.77 × 16 MB each
    taken = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    assert taken < 1.25 * sum(one.nbytes for one in packed if isinstance(one, Offloaded))


@pytest.mark.gpu
def test_while_a_graph_is_captured_everything_stays() -> None:
    model, batch = make_layers()
    expected = gradients(model, batch)
    with keep_saved(model, Cpu(window=0, min_bytes=1 << 16)) as handle:
        (account,) = handle.accounts.values()
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                gradients(model, batch)
        torch.cuda.current_stream().wait_stream(beside)
        packed = account.stretches
        assert packed > 0
        graph = torch.cuda.CUDAGraph()
        model.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            model(batch).square().mean().backward()
        assert account.stretches == packed
    graph.replay()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
