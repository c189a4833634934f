"""Saved tensors on a disk: out of memory, in order, and gone afterwards."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from retrograd.core.errors import RetrogradWarning
from retrograd.memory.policies import spill_file
from retrograd.memory.policies.disk import Disk, Spilled
from retrograd.memory.policies.policy import Saved
from retrograd.memory.policies.spill_file import (
    BLOCK,
    CHUNK,
    Extent,
    FreeSpace,
    ReadBuffers,
    SpillFile,
    map_pages,
    open_spill_file,
    whole_blocks,
)
from retrograd.memory.policies.spill_threads import FileRange, SpillReader
from retrograd.memory.saved.keeping import keep_saved
from tests import warm
from tests.processes import wait_for_child

WIDTH, BATCH, LAYERS = 512, 256, 12
LAYER_BYTES = WIDTH * BATCH * 4


def make_model() -> nn.Module:
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def as_saved(values: torch.Tensor) -> Saved:
    return Saved(values, values.shape, "", 0)


def gradients(model: nn.Module, policy: Disk | None, *, flushes: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(2)
    x = torch.randn(BATCH, WIDTH)
    model.zero_grad()
    with nullcontext() if policy is None else keep_saved(model, policy):
        loss = model(x).sum()
        if policy is not None and flushes:
            policy.flush()
        loss.backward()
    return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


# ---- out of memory --------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def cached_bytes(descriptor: int) -> int:
    """How much of a file is in the page cache, by ``mincore``."""
    length = os.fstat(descriptor).st_size
    with mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        pages = (ctypes.c_ubyte * (-(-length // mmap.PAGESIZE)))()
        anchor = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(length), pages) == 0
        del anchor
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and asks mincore")
@pytest.mark.parametrize("is_direct", [True, False])
def test_nine_tenths_of_what_is_saved_are_neither_in_memory_nor_in_the_page_cache(
    is_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_direct:
        monkeypatch.setattr(SpillFile, "_go_direct", lambda self, path: False)
    model, policy = make_model(), Disk(tmp_path)
    with keep_saved(model, policy) as handle:
        model(torch.randn(BATCH, WIDTH)).sum().backward()  # whatever is allocated once is
        before = resident_bytes()
        loss = model(torch.randn(BATCH, WIDTH)).sum()
        policy.flush()
        saved = handle.accounts[policy].saved_bytes // 2
        assert saved >= LAYERS * LAYER_BYTES
        file = open_spill_file(tmp_path)
        assert resident_bytes() - before + cached_bytes(file._descriptor) <= 0.1 * saved
        loss.backward()
        assert cached_bytes(file._descriptor) <= 0.1 * saved


def test_it_says_what_it_was_made_with(tmp_path: Path) -> None:
    assert repr(Disk(tmp_path)) == f"Disk('{tmp_path}')"
    assert repr(Disk(tmp_path, max_waiting=5, min_bytes=6)) == f"Disk('{tmp_path}', max_waiting=5, min_bytes=6)"


def test_space_is_used_again(tmp_path: Path) -> None:
    model, policy = make_model(), Disk(tmp_path)
    sizes = []
    with keep_saved(model, policy):
        for _ in range(4):
            loss = model(torch.randn(BATCH, WIDTH)).sum()
            policy.flush()
            sizes.append(os.fstat(open_spill_file(tmp_path)._descriptor).st_size)
            loss.backward()
            del loss
    assert sizes[-1] == sizes[0] <= (LAYERS + 2) * (LAYER_BYTES + BLOCK)


def test_a_forward_that_is_faster_than_the_disk_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits to be written is bounded."""
    policy, most = Disk(tmp_path, max_waiting=3 * LAYER_BYTES), 0
    write = SpillFile.write

    def slow(self: SpillFile, parts: Iterable[torch.Tensor], extent: Extent) -> None:
        threading.Event().wait(0.02)
        write(self, parts, extent)

    monkeypatch.setattr(SpillFile, "write", slow)
    policy.open()
    kept = []
    for _ in range(12):
        kept.append(policy.pack(as_saved(torch.randn(LAYER_BYTES // 4))))
        most = max(most, sum(packed.values is not None for packed in kept))  # type: ignore[union-attr]
    policy.close()
    assert 2 <= most <= 4


def test_reading_ahead_follows_the_order_of_the_last_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is known, nothing but the first is read by the thread that computes."""
    policy = Disk(tmp_path)
    readers: list[str] = []
    read = SpillFile.read

    def note(self: SpillFile, *args: Any) -> None:
        readers.append(threading.current_thread().name)
        read(self, *args)

    monkeypatch.setattr(SpillFile, "read", note)
    order = [3, 0, 7, 1, 6, 2, 5, 4]
    policy.open()
    for attempt in range(2):
        packed = [policy.pack(as_saved(torch.full((40_000,), float(n)))) for n in range(8)]
        policy.flush()
        readers.clear()
        for number in order:
            assert packed[number].restore()[0] == number  # type: ignore[union-attr]
            for one in packed:
                if one.coming is not None:  # type: ignore[union-attr]
                    one.coming[0].wait()  # type: ignore[union-attr]
        if attempt:
            assert readers.count("retrograd-disk-reader") == len(readers) - 1 >= 2
    del packed
    policy.close()


# ---- many at once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("is_direct", [True, False])
def test_what_is_written_at_once_is_read_at_once(
    is_direct: bool, is_short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the kernel moves less than it is asked to."""
    if not is_direct:
        monkeypatch.setattr(SpillFile, "_go_direct", lambda self, path: False)
    if is_short:
        pwrite, preadv = os.pwrite, os.preadv
        monkeypatch.setattr(os, "pwrite", lambda fd, memory, at: pwrite(fd, memory[: 3 * BLOCK], at))
        monkeypatch.setattr(os, "preadv", lambda fd, memories, at: preadv(fd, [memories[0][: 3 * BLOCK]], at))
    sizes = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 2 * BLOCK, 5, 2 * CHUNK + 17, 100]
    parts = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    file = SpillFile(tmp_path)
    before = file.take(3 * BLOCK)
    room = file.take(sum(whole_blocks(size) for size in sizes))
    file.write(iter(parts), room)
    memory = map_pages(room.length)
    file.read(room.offset, memory)
    for part in parts:
        assert bytes(memory[: len(part)]) == bytes(part.numpy())
        memory = memory[whole_blocks(len(part)) :]
    assert before.offset + before.length <= room.offset


def test_ranges_are_written_and_read_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread is woken, and the kernel is called, for megabytes and not for each range."""
    calls = {"write": 0, "read": 0}
    for name in calls:
        real = getattr(SpillFile, name)

        def count(self: SpillFile, *args: Any, name: str = name, real: Any = real) -> None:
            calls[name] += 1
            real(self, *args)

        monkeypatch.setattr(SpillFile, name, count)
    policy = Disk(tmp_path)
    policy.open()
    values = [torch.randn(BLOCK // 4 * (4 + number % 5)) for number in range(600)]  # 14 MB, in 3½ batches
    packed = [policy.pack(as_saved(one.clone())) for one in values]
    policy.flush()
    assert calls["write"] == -(-sum(one.nbytes for one in values) // CHUNK)
    for one, expected in zip(reversed(packed), reversed(values), strict=True):
        assert torch.equal(one.restore(), expected)  # type: ignore[union-attr]
    assert calls["read"] < 60
    del one, packed
    policy.close()


def test_what_is_asked_for_before_its_batch_is_full_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(SpillFile, "write", lambda self, parts, extent: written.append(extent.length))
    policy = Disk(tmp_path)
    policy.open()
    values = torch.randn(40_000)
    packed = policy.pack(as_saved(values))
    assert packed is not None
    assert packed.restore().data_ptr() == values.data_ptr()
    policy.flush()
    policy.close()
    assert not written


def test_the_last_batch_leaves_when_the_policy_is_closed(tmp_path: Path) -> None:
    policy, values = Disk(tmp_path), torch.randn(40_000)
    policy.open()
    packed = policy.pack(as_saved(values.clone()))
    policy.close()
    assert isinstance(packed, Spilled)
    assert packed.values is None
    assert torch.equal(packed.restore(), values)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(0, 30)), max_size=60))
def test_memory_to_read_into_is_never_given_out_twice_while_a_tensor_lies_in_it(
    steps: list[tuple[bool, int, int]],
) -> None:
    slabs, held = ReadBuffers(), list[tuple[int, torch.Tensor]]()
    for number, (takes, blocks, which) in enumerate(steps):
        if takes or not held:
            slab = slabs.take(blocks * BLOCK)
            assert len(slab) == blocks * BLOCK
            for part in range(blocks):  # a slab is in use until the last of its tensors is gone
                tensor = torch.frombuffer(slab, dtype=torch.uint8, count=BLOCK, offset=part * BLOCK).fill_(number % 256)
                assert tensor.data_ptr() % BLOCK == 0
                held.append((number % 256, tensor))
            del slab, tensor
        else:
            held.pop(which % len(held))
        assert all(torch.all(tensor == mark) for mark, tensor in held)


def test_memory_to_read_into_is_used_again_and_no_more_than_a_few_pieces_are_held_for_later() -> None:
    slabs = ReadBuffers()
    held = [torch.frombuffer(slabs.take(8 << 20), dtype=torch.uint8).fill_(1) for _ in range(9)]
    addresses, before = {one.data_ptr() for one in held}, resident_bytes()
    del held
    assert resident_bytes() - before < -4 * (8 << 20)
    again = [torch.frombuffer(slabs.take(8 << 20), dtype=torch.uint8) for _ in range(4)]
    assert {one.data_ptr() for one in again} <= addresses


def test_a_later_step_reads_into_the_memory_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = list[int]()

    def count(nbytes: int) -> memoryview:
        mapped.append(nbytes)
        return map_pages(nbytes)

    monkeypatch.setattr(spill_file, "map_pages", count)
    reader = SpillReader(file := SpillFile(tmp_path))
    ranges = [FileRange() for _ in range(4)]
    for each in ranges:
        each.nbytes, each.values, each.coming, each.is_wanted = BLOCK, None, None, False
        each.extent = file.take(BLOCK)
        file.write([torch.full((BLOCK,), 7, dtype=torch.uint8)], each.extent)
    written_from = len(mapped)
    for _ in range(3):
        reader.begin(ranges, 2 * BLOCK)
        for each in ranges:
            reading, place = each.coming or pytest.fail("it is not read")
            reading.wait()
            assert reading.memory is not None
            assert reading.memory[place] == 7
            each.coming = None
        del reading
    reader.stop()
    assert len(mapped) - written_from == 2


def test_memory_of_a_slab_comes_back_whatever_thread_deletes_it_and_whatever_it_has_locked() -> None:
    slabs = ReadBuffers()
    tensor = torch.frombuffer(slabs.take(BLOCK), dtype=torch.float32)
    address, held = tensor.data_ptr(), [tensor]
    del tensor
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert torch.frombuffer(slabs.take(BLOCK), dtype=torch.float32).data_ptr() == address


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_piece_that_is_not_whole_large_pages_takes_no_more_than_its_size() -> None:
    nbytes = (2 << 20) + 5 * BLOCK
    before = resident_bytes()
    pieces = [map_pages(nbytes) for _ in range(8)]
    for piece in pieces:
        piece[:] = bytes(nbytes)
    assert resident_bytes() - before <= 8 * nbytes + (1 << 20)


def test_a_second_pass_over_a_retained_graph_is_read_ahead_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, readers = Disk(tmp_path), list[str]()
    read = SpillFile.read

    def note(self: SpillFile, *args: Any) -> None:
        readers.append(threading.current_thread().name)
        read(self, *args)

    monkeypatch.setattr(SpillFile, "read", note)
    policy.open()
    packed = [policy.pack(as_saved(torch.full((40_000,), float(n)))) for n in range(20)]
    policy.flush()
    for _ in range(3):
        readers.clear()
        for number in range(19, -1, -1):
            assert packed[number].restore()[0] == number  # type: ignore[union-attr]
        assert sum(name != "retrograd-disk-reader" for name in readers) == 1  # the first one
    del packed
    policy.close()


def test_what_reading_ahead_finds_in_memory_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not written in the last moment, only to be read again."""
    written: list[int] = []
    monkeypatch.setattr(SpillFile, "write", lambda self, parts, extent: written.append(extent.length))
    policy = Disk(tmp_path)
    policy.open()
    values = [torch.randn(20_000) for _ in range(3)]
    packed = [policy.pack(as_saved(one)) for one in values]
    assert packed[2].restore() is not None  # type: ignore[union-attr]
    policy.flush()
    policy.close()
    assert not written
    for one, expected in zip(packed, values, strict=True):
        assert one.restore().data_ptr() == expected.data_ptr()  # type: ignore[union-attr]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("as planned")])
def test_what_could_not_be_read_ahead_is_read_again_by_who_asks(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens to the thread that reads ahead, nobody waits for it in vain."""
    read = SpillFile.read

    def fail(self: SpillFile, *args: Any) -> None:
        if threading.current_thread().name == "retrograd-disk-reader":
            raise error
        read(self, *args)

    monkeypatch.setattr(SpillFile, "read", fail)
    model = make_model()
    expected = gradients(model, None)
    found = gradients(model, Disk(tmp_path), flushes=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
def test_a_process_may_end_while_it_holds_what_was_read(tmp_path: Path) -> None:
    run_python(f"""
    import torch
    from retrograd.memory.policies.disk import Disk
    from tests.memory.policies.test_disk import as_saved
    policy = Disk({str(tmp_path)!r})
    policy.open()
    packed = [policy.pack(as_saved(torch.full((40_000,), float(n)))) for n in range(8)]
    policy.flush()
    kept = [one.restore() for one in reversed(packed)]
    cycle = [kept]
    cycle.append(cycle)
    """)


# ---- faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError("No space left for a list")])
def test_a_full_disk_leaves_the_rest_in_memory_with_one_warning(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends the thread that writes, nobody waits for it in vain."""

    def full(self: SpillFile, parts: Iterable[torch.Tensor], extent: Extent) -> None:
        raise error

    model = make_model()
    expected = gradients(model, None)
    monkeypatch.setattr(SpillFile, "write", full)
    policy = Disk(tmp_path, max_waiting=3 * LAYER_BYTES)
    with pytest.warns(RetrogradWarning, match="No space left") as caught:
        found = gradients(model, policy)
    assert len(caught) == 1
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_write_that_failed_holds_nothing_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error keeps the frames that it went through, and these what was to be written."""

    def full(self: SpillFile, parts: Iterable[torch.Tensor], extent: Extent) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SpillFile, "write", full)
    policy = Disk(tmp_path)
    policy.open()
    gc.disable()
    try:
        values = torch.randn(40_000)
        storage = weakref.ref(values.untyped_storage())
        packed = policy.pack(as_saved(values))
        policy.flush()
        assert policy._spill is not None
        assert policy._spill.failure is not None
        del values, packed
        assert storage() is None
    finally:
        gc.enable()
    with pytest.warns(RetrogradWarning, match="No space left"):
        policy.close()


def test_who_flushes_does_not_wait_for_what_others_add_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small range is sent with the next ones, and another thread may add none."""
    policy, others = Disk(tmp_path, min_bytes=0), []
    write = SpillFile.write

    def write_beside_another_thread(self: SpillFile, parts: Iterable[torch.Tensor], extent: Extent) -> None:
        if not others:
            thread = threading.Thread(target=lambda: others.append(policy.pack(as_saved(torch.randn(100)))))
            thread.start()
            thread.join()
        write(self, parts, extent)

    monkeypatch.setattr(SpillFile, "write", write_beside_another_thread)
    policy.open()
    packed = policy.pack(as_saved(torch.randn(40_000)))
    flushing = threading.Thread(target=policy.flush, daemon=True)
    flushing.start()
    flushing.join(20)
    assert not flushing.is_alive()
    assert len(others) == 1
    assert packed is not None
    assert packed.resident_bytes == 0
    policy.close()


@pytest.mark.slow
def test_a_real_limit_of_the_file_size(tmp_path: Path) -> None:
    """The kernel refuses the write, in the middle of a pass."""
    script = f"""
    import resource, warnings, torch
    from retrograd.memory.policies.disk import Disk
    from tests.memory.policies.test_disk import LAYER_BYTES, gradients, make_model
    torch.set_num_threads(1)
    model = make_model()
    expected = gradients(model, None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * LAYER_BYTES + 1000, resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            found = gradients(model, Disk({str(tmp_path)!r}))
            assert all(torch.equal(a, b) for a, b in zip(found, expected))
            assert len(caught) == 1, [str(w.message) for w in caught]
            assert "cannot be written to" in str(caught.pop().message)
    """
    run_python(script)


@pytest.mark.parametrize("what", ["missing", "a file"])
def test_a_missing_folder_leaves_all_in_memory_with_one_warning(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "no" / "where" if what == "missing" else tmp_path / "file"
    if what == "a file":
        folder.write_text("")
    model = make_model()
    expected = gradients(model, None)
    with pytest.warns(RetrogradWarning, match="stay in memory") as caught:
        found = gradients(model, Disk(folder))
    assert len(caught) == 1
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_cannot_be_read_back_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, policy = make_model(), Disk(tmp_path)
    with keep_saved(model, policy):
        loss = model(torch.randn(BATCH, WIDTH)).sum()
        policy.flush()
        monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output error"):
            loss.backward()


def test_an_interrupt_before_a_request_leaves_nobody_waiting_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def put(self, request: object) -> None:
            raise KeyboardInterrupt

    model, policy = make_model(), Disk(tmp_path)
    expected = gradients(model, None)
    model.zero_grad()
    with keep_saved(model, policy):
        torch.manual_seed(2)
        loss = model(torch.randn(BATCH, WIDTH)).sum()
        policy.flush()
        assert policy._spill is not None
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(policy._spill._reader, "_readings", Interrupted())
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), expected, strict=True))


# ---- nothing is left ------------------------------------------------------------------------------------------


def test_no_file_is_ever_seen_and_none_is_left(tmp_path: Path) -> None:
    model, policy = make_model(), Disk(tmp_path)
    gc.collect()
    descriptors = open_files()
    with keep_saved(model, policy):
        loss = model(torch.randn(BATCH, WIDTH)).sum()
        assert not list(tmp_path.iterdir())
    assert open_files() == descriptors + 1  # a graph still needs it
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("retrograd")]
    loss.backward()
    del loss
    gc.collect()
    assert open_files() == descriptors


def test_two_policies_share_the_file_of_a_folder(tmp_path: Path) -> None:
    model = make_model()
    descriptors = open_files()
    with keep_saved(model, {"0": Disk(tmp_path), "*": Disk(tmp_path)}):
        loss = model(torch.randn(BATCH, WIDTH)).sum()
        assert open_files() == descriptors + 1
        loss.backward()


@pytest.mark.slow
def test_nothing_is_left_after_kill_9(tmp_path: Path) -> None:
    script = f"""
    import os, signal, torch
    from retrograd.memory.policies.disk import Disk
    from retrograd.memory.saved.keeping import keep_saved
    from tests.memory.policies.test_disk import BATCH, WIDTH, make_model
    model, policy = make_model(), Disk({str(tmp_path)!r})
    with keep_saved(model, policy):
        loss = model(torch.randn(BATCH, WIDTH)).sum()
        policy.flush()
        assert os.fstat(policy._spill.file._descriptor).st_size > 1_000_000
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run_python(script, expected=-signal.SIGKILL)
    assert not list(tmp_path.iterdir())


def test_where_open_files_keep_their_names_the_next_start_removes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refuse)
    SpillFile(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(Path, "unlink", unlink)
    SpillFile(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_forked_child_does_no_harm_and_can_train(tmp_path: Path) -> None:
    """Workers of a data loader are forked in the middle of a run."""
    model, policy = make_model(), Disk(tmp_path)
    expected = gradients(model, None)
    with keep_saved(model, policy):
        torch.manual_seed(2)
        loss = model(torch.randn(BATCH, WIDTH)).sum()
        policy.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads: that is the point
            child = os.fork()
        if not child:
            try:
                found = gradients(model, policy)
                is_right = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
                os._exit(0 if is_right else 1)
            finally:
                os._exit(2)
        assert wait_for_child(child) == 0
        model.zero_grad()
        loss.backward()
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), expected, strict=True))


# ---- free space -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 30)), max_size=60))
def test_extents_never_overlap_and_all_space_comes_back(steps: list[tuple[bool, int, int]]) -> None:
    space, held = FreeSpace(), []
    for takes, length, which in steps:
        if takes or not held:
            extent = space.take(length)
            assert extent.length == length
            for other in held:
                assert extent.offset + length <= other.offset or other.offset + other.length <= extent.offset
            held.append(extent)
        else:
            space.give(held.pop(which % len(held)))
        assert space.end == max((e.offset + e.length for e in held), default=0)
    assert sum(size for _, size in space._free) == space.end - sum(extent.length for extent in held)


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert spill_file.default_folder() == tmp_path
    monkeypatch.delenv("TMPDIR")
    assert spill_file.default_folder() in (Path("/var/tmp"), Path("/tmp"))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def run_python(script: str, expected: int = 0) -> None:
    root = Path(__file__).parents[3]
    done = warm.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == expected, done.stderr
