import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from retrograd.core.history.history import History
from retrograd.core.history.kept import TensorRing, unscale
from retrograd.core.history.sink import KeptTensor, Moment


def keep(step: int, tensor: torch.Tensor, site: str = "a:output", scale: float = 1.0) -> KeptTensor:
    return KeptTensor(Moment(step), site, tensor, tensor._version, scale)


def make_history(**rest: int) -> History:
    history = History(**rest)
    history.add_sites(["a:output", "a:output.grad", "b:output"])
    return history


def test_the_last_tensors_of_each_site() -> None:
    history = make_history(keep_last=2)
    for step in range(5):
        history.add_tensor(keep(step, torch.full((2,), float(step))))
        history.add_tensor(keep(step, torch.zeros(3), "b:output"))
    assert [kept.step for kept in history["a:output"].tensors] == [3, 4]
    assert history["a:output"].tensors[-1].tensor.tolist() == [4.0, 4.0]
    assert len(history["b:output"].tensors) == 2
    assert history.events == []


def test_an_overwritten_tensor_is_never_given_out() -> None:
    history = make_history()
    tensor = torch.ones(3)
    history.add_tensor(keep(0, tensor))
    (kept,) = history["a:output"].tensors
    assert kept.tensor is tensor
    assert not kept.overwritten
    tensor.add_(1)
    assert kept.tensor is None
    assert kept.overwritten
    assert "overwritten" in repr(kept)


def test_beyond_the_budget_the_oldest_go_and_it_is_said_once() -> None:
    history = make_history(tensor_budget=100)
    for step in range(10):
        history.add_tensor(keep(step, torch.zeros(10)))
    assert [kept.step for kept in history["a:output"].tensors] == [8, 9]
    (event,) = history.events
    assert (event.kind, event.name, event.moment.step) == ("dropped", "a:output", 2)
    assert history.ring.dropped == 8


def test_a_tensor_larger_than_the_budget_is_dropped_alone() -> None:
    ring = TensorRing(budget=100)
    assert ring.add(keep(0, torch.zeros(20))) == 0
    assert ring.add(keep(1, torch.zeros(20), "b:output")) == 1
    assert ring.add(keep(2, torch.zeros(200))) == 2
    assert ring.bytes == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=40), st.none() | st.integers(1, 3))
def test_the_budget_is_never_passed(given_sizes: list[tuple[str, int]], last: int | None) -> None:
    ring = TensorRing(last, budget=200)
    for step, (site, size) in enumerate(given_sizes):
        ring.add(keep(step, torch.zeros(size), site))
        held = [kept for name in "abc" for kept in ring.of_site(name)]
        assert ring.bytes == sum(4 * kept.tensor.numel() for kept in held) <= 200
        assert all(len(ring.of_site(name)) <= (last or 100) for name in "abc")
        if size <= 50:
            assert step in [kept.moment.step for kept in held]


def test_the_loss_scale_is_divided_out() -> None:
    history = make_history()
    small = torch.tensor([2.0**-14], dtype=torch.float16)
    history.add_tensor(keep(0, small, "a:output.grad", scale=2.0**16))
    found = history["a:output.grad"].tensors[0].tensor
    assert found.dtype is torch.float32
    assert found.item() == 2.0**-30
    assert small.item() == 2.0**-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_unscaling_keeps_wide_types(dtype: torch.dtype) -> None:
    assert unscale(torch.ones(2, dtype=dtype), 2.0).dtype is dtype


def test_a_copy_of_an_inference_tensor() -> None:
    history = make_history()
    with torch.inference_mode():
        history.add_tensor(KeptTensor(Moment(0), "a:output", torch.ones(2), 0))
    assert history["a:output"].tensors[0].tensor.tolist() == [1, 1]


def test_a_sparse_tensor_is_as_large_as_its_elements_and_their_indices() -> None:
    ring = TensorRing(budget=100)
    sparse = torch.sparse_coo_tensor([[0, 9]], torch.ones(2), (10**6,), check_invariants=True)
    assert ring.add(keep(0, sparse)) == 0
    assert ring.bytes == 8 + 16
