"""Statistics that users add."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from retrograd.core.errors import StatisticError
from retrograd.core.statistics.custom import CustomStatistics, CustomValues, Statistic, check_statistic, statistic


def drain(custom: CustomStatistics) -> CustomValues:
    """All values, which are waited for."""
    tables, merge = custom.take()
    return merge([each.numpy() for each in tables])


def kurtosis(tensor: Tensor) -> Tensor:
    centred = tensor - tensor.mean()
    return centred.pow(4).mean() / centred.pow(2).mean() ** 2


@statistic(merge="max")
def largest(tensor: Tensor) -> Tensor:
    return tensor.max()


@statistic(merge="min")
def smallest(tensor: Tensor) -> Tensor:
    return tensor.min()


@statistic(merge="sum", name="size")
def count_elements(tensor: Tensor) -> Tensor:
    return torch.tensor(tensor.numel())


ALL = [check_statistic(each) for each in (kurtosis, largest, smallest, count_elements)]


def test_a_plain_function_is_a_statistic() -> None:
    assert check_statistic(kurtosis) == Statistic(kurtosis, "kurtosis", "mean")
    assert [each.name for each in ALL] == ["kurtosis", "largest", "smallest", "size"]


def test_values_merge_as_they_say() -> None:
    custom = CustomStatistics(ALL)
    tensors = [torch.arange(5.0), torch.tensor([-3.0, 1.0, 2.0])]
    for tensor in tensors:
        custom.observe(tensor, 3)
    custom.observe(torch.tensor([1.0, 2.0]), 200)
    drained = drain(custom)
    assert list(drained) == ["kurtosis", "largest", "smallest", "size"]
    assert all(rows == [3, 200] for rows, _ in drained.values())
    assert drained["largest"][1] == [4.0, 2.0]
    assert drained["smallest"][1] == [-3.0, 1.0]
    assert drained["size"][1] == [8.0, 2.0]
    assert drained["kurtosis"][1][0] == pytest.approx(sum(kurtosis(t).item() for t in tensors) / 2)
    assert drain(custom) == {}


def test_forget() -> None:
    custom = CustomStatistics(ALL)
    custom.observe(torch.ones(3), 0)
    custom.forget()
    assert drain(custom) == {}
    custom.observe(-torch.ones(3), 0)
    assert drain(custom)["largest"] == ([0], [-1.0])


def test_no_graph_and_no_reference() -> None:
    custom = CustomStatistics([check_statistic(lambda_like)])
    x = torch.randn(10, requires_grad=True) * 1
    watch, node = weakref.ref(x), x.grad_fn
    gc.disable()
    try:
        custom.observe(x, 0)
        assert x.grad_fn is node
        del x
        assert watch() is None
    finally:
        gc.enable()
    assert len(drain(custom)["lambda_like"][1]) == 1


def lambda_like(tensor: Tensor) -> Tensor:
    return tensor.flatten()[0]  # a view, which must not keep the tensor


def test_plain_numbers_and_one_element_tensors_are_numbers_too() -> None:
    def four(tensor: Tensor) -> float:
        return 4.0

    def one(tensor: Tensor) -> Tensor:
        return torch.ones(1, 1)

    custom = CustomStatistics([check_statistic(four), check_statistic(one)])
    custom.observe(torch.zeros(2), 0)
    assert drain(custom) == {"four": ([0], [4.0]), "one": ([0], [1.0])}


def test_not_a_number_stays() -> None:
    custom = CustomStatistics(ALL)
    custom.observe(torch.tensor([1.0, float("nan")]), 0)
    custom.observe(torch.tensor([1.0, 2.0]), 0)
    drained = drain(custom)
    assert drained["largest"][1][0] != drained["largest"][1][0]


def test_inference_mode() -> None:
    custom = CustomStatistics([largest])
    with torch.inference_mode():
        custom.observe(torch.ones(2), 0)
    custom.observe(torch.ones(2, requires_grad=True), 0)
    assert drain(custom) == {"largest": ([0], [1.0])}


def returns_nothing(tensor: Tensor) -> None: ...


def returns_many(tensor: Tensor) -> Tensor:
    return tensor.abs()


def returns_complex(tensor: Tensor) -> Tensor:
    return tensor.sum() * 1j


def changes_its_tensor(tensor: Tensor) -> Tensor:
    return tensor.mul_(2).sum()


def fails(tensor: Tensor) -> Tensor:
    raise ZeroDivisionError("by zero")


def rms(tensor: Tensor) -> Tensor:
    return tensor.sum()


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (returns_nothing, "NoneType"),
        (returns_many, r"shape \(4, 8\)"),
        (returns_complex, "complex64"),
        (changes_its_tensor, "changes the tensor"),
        (fails, "by zero"),
        (rms, "always recorded"),
        (lambda tensor: tensor.sum(), "<lambda>"),
        ("kurtosis", "not a function"),
    ],
)
def test_what_is_no_statistic_is_refused_before_training(function: object, problem: str) -> None:
    with pytest.raises(StatisticError, match=problem) as caught:
        check_statistic(function)
    assert caught.value.repair


def test_unknown_merge() -> None:
    with pytest.raises(StatisticError, match="median"):
        statistic(merge="median")  # type: ignore[call-overload]


def test_two_of_one_name() -> None:
    with pytest.raises(StatisticError, match="one name"):
        CustomStatistics([largest, largest])
