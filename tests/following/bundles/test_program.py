from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from retrograd.core.errors import CannotBundleError, ReplayError
from retrograd.core.foreign.text import from_plain, to_plain
from retrograd.following.bundles.copies import (
    MemoryBlock,
    MemoryCopier,
    StoredTensor,
    TensorCopies,
    check_copies,
    rebuild,
    same_bits,
)
from retrograd.following.bundles.program import (
    BundledOperation,
    Raised,
    decode,
    describe_error,
    encode,
    run_operations,
)

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.sampled_from([torch.float32, torch.bool, torch.strided, torch.sparse_coo, torch.channels_last])
    | st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")])
)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.lists(inner).map(tuple), max_leaves=10)


def no_tensor(tensor: Tensor) -> int:
    raise AssertionError("there is none")


def run(operations: list[BundledOperation], outputs: tuple[str | int | None, ...], *inputs: Tensor) -> Any:
    read = from_plain(json.loads(json.dumps(to_plain(operations))), tuple[BundledOperation, ...])
    assert read == tuple(operations)
    return run_operations(read, outputs, dict(zip("xyz", inputs, strict=False)), lambda number: None)


@given(VALUES)
def test_arguments_survive_json(value: Any) -> None:
    again = decode(json.loads(json.dumps(encode(value, no_tensor), allow_nan=False)), {})
    assert repr(again) == repr(value)


def test_what_was_caught_is_passed_over() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(RuntimeError) as caught:
        x.mm(x)
    wrong = BundledOperation("aten::mm", ({"tensor": "x"}, {"tensor": "x"}), {}, raises=describe_error(caught.value))
    right = BundledOperation("aten::neg", ({"tensor": "x"},), {}, {"tensor": 1})
    assert run([wrong, right], (1,), x).outputs[0].tolist() == (-x).tolist()
    ran = run([right, wrong], (), x)
    assert (str(ran.error), ran.stopped_at) == (str(caught.value), 1)
    other = BundledOperation("aten::mm", wrong.args, {}, raises=Raised("ValueError", "no"))
    assert isinstance(run([other, right], (1,), x).error, RuntimeError)
    silent = BundledOperation("aten::neg", right.args, {}, {"tensor": 1}, raises=Raised("ValueError", "no"))
    ran = run([silent, right], (1,), x)
    assert (ran.error, ran.stopped_at) == (None, 0)


@pytest.mark.parametrize(
    "name",
    ["nowhere::mm", "aten::mm.sideways", "aten::__class__", "_dir::add", "load_library::x", "__class__::mro", "os", ""],
)
def test_an_operation_that_the_dispatcher_does_not_have_is_named(name: str) -> None:
    """Nothing but an operation is found by a name: no function, class or module of torch's."""
    with pytest.raises(ReplayError, match=f"does not know the operation {name}"):
        run([BundledOperation(name, ())], ())


# copies of tensors


def tensors_of_all_kinds() -> list[Tensor]:
    base = torch.randn(6, 8)
    wild = torch.tensor([0.0, -0.0, math.nan, -math.inf])
    sparse = torch.eye(3).to_sparse()
    return [
        base,
        base.t()[1:, ::2],
        base[2:4].expand(3, 2, 8),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex128).conj().imag,
        wild.bfloat16(),
        wild.to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.arange(5),
        torch.tensor(3),
        torch.empty(0, 3),
        sparse,
        sparse.to_sparse_csr(),
        torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=False),
        torch._efficientzerotensor((2, 3)),
        torch.empty(2, 3, device="meta"),
        torch.from_numpy(torch.randn(9).numpy()[1:]),
    ]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_copy_is_the_same_in_every_respect() -> None:
    tensors = tensors_of_all_kinds()
    memory = TensorCopies(tensors, "it")
    written = json.loads(json.dumps(to_plain([memory.tensors, memory.blocks])))
    stored = from_plain(written[0], tuple[StoredTensor, ...])
    blocks = from_plain(written[1], Mapping[str, MemoryBlock])
    check_copies(stored, blocks, memory.entries)
    for tensor, copy in zip(tensors, rebuild(stored, blocks, memory.entries), strict=True):
        assert copy is not None
        assert same_bits(tensor, copy)
        assert (copy.device, copy.is_conj(), copy.is_neg()) == (tensor.device, tensor.is_conj(), tensor.is_neg())
        if tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor._is_zerotensor():
            assert (copy.stride(), copy.storage_offset() >= 0) == (tensor.stride(), True)
            assert copy.data_ptr() % 16 == tensor.data_ptr() % 16
        elif tensor.layout is torch.sparse_coo:
            assert copy.is_coalesced() == tensor.is_coalesced()


def test_views_of_one_memory_share_it_again() -> None:
    base = torch.arange(100.0)
    middle, end, _ = rebuilt = TensorCopies([base[50:60], base[55:], torch.ones(3)], "it").rebuild()
    assert rebuilt[2] is not None
    assert middle is not None
    assert end is not None
    middle.zero_()
    assert end[:6].tolist() == [0, 0, 0, 0, 0, 60]
    assert base[55] == 55


def test_only_what_is_seen_of_a_large_memory_is_copied() -> None:
    base = torch.zeros(1_000_000)
    assert sum(each.nbytes for each in TensorCopies([base[500_000:][:10]], "it").entries.values()) < 200


def test_memory_that_was_given_back_is_refused() -> None:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(CannotBundleError, match="given back"):
        MemoryCopier().store(tensor, "it")


@pytest.mark.parametrize("other", [torch.tensor([0.0, -0.0]), torch.zeros(2, dtype=torch.float64), torch.zeros(3)])
def test_other_bits_are_other_bits(other: Tensor) -> None:
    assert not same_bits(torch.zeros(2), other)
