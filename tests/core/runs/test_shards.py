from pathlib import Path

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings

from retrograd.core.errors import RetrogradWarning
from retrograd.core.history.sink import KeptTensor, Moment
from retrograd.core.limits import LIMITS
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.shards import (
    ShardFolder,
    UnstorableTensorError,
    decode_tensor,
    encode_tensor,
    parse_name,
    print_name,
)
from tests.core.history.made import make_steps
from tests.core.runs.written import files, keep, open_writer

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.complex64, torch.complex128, torch.int64, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(data.tolist())


def make_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of random bits, so that every value there is may come up."""
    size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("shape", [(), (0,), (3, 2), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_comes_back(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = make_tensor(dtype, shape)
    entries, note = encode_tensor("x", tensor)
    stored = safetensors.torch.load(safetensors.torch.save(entries))
    assert bits(decode_tensor(stored, "x", note)) == bits(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0)[::3],
        torch.ones(1).expand(4),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor(700, dtype=torch.uint16).expand(1),
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "negative", "parameter", "one element"],
)
def test_views_and_leaves(tensor: torch.Tensor) -> None:
    entries, note = encode_tensor("x", tensor)
    found = decode_tensor(safetensors.torch.load(safetensors.torch.save(entries)), "x", note)
    assert not found.requires_grad
    torch.testing.assert_close(found, tensor.detach().resolve_conj().resolve_neg(), rtol=0, atol=0)


def test_sparse_tensors() -> None:
    values = torch.tensor([1.0, 2, 3], dtype=torch.complex64)
    tensor = torch.sparse_coo_tensor([[0, 2, 0], [1, 0, 1]], values, (3, 4), check_invariants=True)
    entries, note = encode_tensor("x", tensor)
    found = decode_tensor(safetensors.torch.load(safetensors.torch.save(entries)), "x", note)
    assert found.is_sparse
    assert torch.equal(found.to_dense(), tensor.to_dense())


def test_what_cannot_be_stored() -> None:
    with pytest.raises(UnstorableTensorError, match="meta"):
        encode_tensor("x", torch.ones(2, device="meta"))
    with pytest.raises(UnstorableTensorError, match="layout"):
        encode_tensor("x", torch.ones(2).to_mkldnn())


@given(
    st.integers(0, 10**12),
    st.integers(0, 99),
    st.integers(-1, 9),
    st.sampled_from(["a:output", "x#2:output.a/b", "watch/p/q.grad"]),
)
def test_names_of_tensors(step: int, micro: int, backward: int, site: str) -> None:
    moment = Moment(step, micro, backward, "eval")
    assert parse_name(print_name(moment, site)) == (moment, site)


def test_many_kinds_in_one_run(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    made = [make_tensor(dtype, (2, 3)) for dtype in DTYPES]
    for step, tensor in enumerate(made):
        writer.add_tensor(keep(step, tensor))
    writer.add_tensor(keep(99, torch.ones(2, device="meta")))
    writer.close()
    run = open_run(tmp_path)
    assert [bits(kept.tensor) for kept in run.history["a:output"].tensors] == [bits(tensor) for tensor in made]
    assert all(name.endswith(".safetensors") for name in files(tmp_path, "tensors"))  # one or more
    (event,) = run.history.events
    assert (event.kind, event.moment.step, event.text) == ("dropped", 99, "a meta tensor is not stored")


def test_what_a_device_computes_is_waited_for_before_it_is_copied(tmp_path: Path) -> None:
    tensor = torch.zeros(2)

    class Computed:
        def synchronize(self) -> None:
            tensor.numpy()[:] = 7  # counts no version, as a kernel that was launched before

    writer = open_writer(tmp_path)
    writer.add_tensor(KeptTensor(Moment(0), "a:output", tensor, tensor._version, ready=[Computed()]))
    writer.close()
    (kept,) = open_run(tmp_path).history["a:output"].tensors
    assert kept.tensor.tolist() == [7.0, 7.0]


def test_moments_scales_and_twins_come_back(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    tensor = torch.tensor([2.0**-14, 1.0], dtype=torch.float16)
    moment = Moment(3, 1, 2, "train")
    for _ in range(2):  # the same name twice
        writer.add_tensor(KeptTensor(moment, "a:output.grad", tensor, tensor._version, 2.0**16))
    writer.close()
    first, second = open_run(tmp_path).history["a:output.grad"].tensors
    assert (first.step, first.micro, first.backward, first.phase) == (3, 1, 2, "train")
    for kept in (first, second):
        assert kept.tensor.dtype is torch.float32
        assert kept.tensor.tolist() == [2.0**-30, 2.0**-16]
    stored = safetensors.torch.load_file(tmp_path / "rank00000" / "tensors" / "shard-00000000.safetensors")
    assert bits(next(iter(stored.values()))) == bits(tensor)


def test_shards_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "shard_bytes", 10_000)
    writer = open_writer(tmp_path)
    for step in range(20):
        writer.add_tensor(keep(step, torch.full((500,), float(step))))
    writer.close()
    assert len(files(tmp_path, "tensors")) == 5
    found = open_run(tmp_path).history["a:output"].tensors
    assert [kept.tensor[0].item() for kept in found] == list(range(20))


def test_an_overwritten_tensor_is_reported_and_not_stored(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    before, good = torch.zeros(3), torch.ones(3)
    writer.add_tensor(keep(0, before))
    writer.add_tensor(keep(1, good))
    before.add_(1)
    writer.close()
    run = open_run(tmp_path)
    lost, kept = run.history["a:output"].tensors
    assert lost.overwritten
    assert lost.tensor is None
    assert kept.tensor.tolist() == [1, 1, 1]
    assert [(event.kind, event.name, event.moment.step) for event in run.history.events] == [
        ("overwritten", "a:output", 0)
    ]
    assert run.ranks[0].facts["events"] == {"overwritten": 1}


def test_a_copy_is_trusted_only_when_training_has_gone_on(tmp_path: Path) -> None:
    """An operation in place counts the version up when it is done: the copy may have been made in its middle."""
    added = 0
    folder = ShardFolder(tmp_path / "tensors", budget=10**6, count_added=lambda: added)
    changing, still = torch.zeros(3), torch.ones(3)
    folder.copy(keep(0, changing))
    folder.copy(keep(1, still))
    folder.write(is_paused=False)
    assert folder.bytes == 0
    changing.add_(1)
    added += 1
    folder.write(is_paused=False)
    assert [event.kind for event in folder.news] == ["overwritten"]
    ((path,),) = [list(folder.folder.iterdir())]
    assert list(safetensors.torch.load_file(path)) == ["1/0/-1/train/a:output"]


def test_a_copy_is_trusted_when_the_training_thread_waits(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.add_tensor(keep(0, torch.ones(2)))
    writer.flush()
    assert len(files(tmp_path, "tensors")) == 1
    writer.close()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 6000),
    st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from([torch.float32, torch.complex64, torch.float8_e8m0fnu])),
        max_size=12,
    ),
    st.booleans(),
)
def test_the_budget_is_never_passed(
    tmp_path_factory: pytest.TempPathFactory, budget: int, sizes: list[tuple[int, torch.dtype]], often: bool
) -> None:
    folder = ShardFolder(tmp_path_factory.mktemp("shards") / "tensors", budget, count_added=lambda: 0)
    for step, (size, dtype) in enumerate(sizes):
        folder.copy(keep(step, make_tensor(dtype, (size,)), 'ünï"code\\:output', scale=1.0 + step))
        if often:
            folder.write(is_paused=True)
    folder.write(is_paused=True)
    taken = sum(path.stat().st_size for path in folder.folder.glob("*"))
    assert folder.bytes == taken <= budget
    names = [name for path in folder.folder.glob("*") for name in safetensors.torch.load_file(path)]
    assert len(names) + folder.dropped == len(sizes)


def test_a_spent_budget_is_said_once_and_recorded(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, tensor_budget=3000)
    with pytest.warns(RetrogradWarning, match="budget of 3,000 bytes") as said:
        for step in range(10):
            writer.add_tensor(keep(step, torch.zeros(200)))
            writer.flush()
    assert len(said) == 1
    writer.close()
    run = open_run(tmp_path)
    assert [kept.step for kept in run.history["a:output"].tensors] == [0, 1]
    assert [(event.kind, event.name, event.moment.step) for event in run.history.events] == [("dropped", "a:output", 2)]
    assert run.ranks[0].facts["tensors_dropped"] == 8


def test_tensors_without_rows(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.add_rows(make_steps([0])[0])
    writer.add_tensor(keep(0, torch.ones(1), "b:output"))
    writer.close()
    assert len(open_run(tmp_path).history["b:output"].tensors) == 1
