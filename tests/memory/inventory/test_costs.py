"""The table of what recomputing a tensor takes, against what torch's operations do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from retrograd.memory.inventory import costs
from retrograd.memory.inventory.costs import find_cost, find_cost_of_saved, is_view

X = torch.randn(2, 6, 4, requires_grad=True)

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.transpose(1, 2),
    "t": lambda x: x[0].t(),
    "permute": lambda x: x.permute(2, 0, 1),
    "view": lambda x: x.view(12, 4),
    "expand": lambda x: x[:, :1].expand(2, 6, 4),
    "slice": lambda x: x[:, 1:3],
    "select": lambda x: x[0],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "split": lambda x: x.split(2, 1)[1],
    "unbind": lambda x: x.unbind(1)[0],
    "diagonal": lambda x: x[0].diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 1)),
}

CHEAP: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "add": lambda x: x + 1,
    "mul": lambda x: x * 2,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, (4,)),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 2),
    "cast": lambda x: x.double(),
    "cat": lambda x: torch.cat([x, x]),
    "max pool": lambda x: F.max_pool2d(x[None], 2),
}

DEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "mm": lambda x: x[0] @ x[0].t(),
    "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
    "addmm": lambda x: F.linear(x[0], torch.randn(3, 4), torch.randn(3)),
    "conv": lambda x: F.conv1d(x, torch.randn(2, 6, 3)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}


def kind_of(result: Tensor) -> str:
    assert result.grad_fn is not None
    return result.grad_fn.name()


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_views_share_memory_and_are_free(make: Callable[[Tensor], Tensor]) -> None:
    result = make(X)
    assert result.untyped_storage().data_ptr() == X.untyped_storage().data_ptr()
    assert is_view(kind_of(result))


@pytest.mark.parametrize(
    ("make", "price"),
    [*((each, "cheap") for each in CHEAP.values()), *((each, "dear") for each in DEAR.values())],
    ids=[*CHEAP, *DEAR],
)
def test_other_results_are_memory_of_their_own(make: Callable[[Tensor], Tensor], price: str) -> None:
    result = make(X)
    assert result.untyped_storage().data_ptr() != X.untyped_storage().data_ptr()
    cost = find_cost(kind_of(result))
    assert cost is not None
    assert cost.price == price


def test_the_table_has_operations_and_nodes_of_torchs() -> None:
    known = {name.partition("Backward")[0] for name in dir(torch._C._functions)}
    assert costs._COSTS_OF_NODES.keys() - known == {"UnsafeChunk"}  # made of others
    assert all(hasattr(torch.ops.aten, name) for name in costs._COSTS)


def test_a_cheap_result_comes_back_bit_for_bit() -> None:
    """Which is what the table is for: the same kernel on the same bytes."""
    for make in CHEAP.values():
        assert torch.equal(make(X), make(X))


def test_what_it_is_decides_too() -> None:
    assert find_cost_of_saved("parameter", None, "linear") is None
    assert find_cost_of_saved("input", None, "conv2d") is None
    assert str(find_cost_of_saved("cast", "ToCopyBackward0", "linear")) == "cast of the parameter"
    assert find_cost_of_saved("intermediate", None, "relu") is None
    mask = find_cost_of_saved("intermediate", None, "dropout")
    assert mask is not None
    assert mask.sources == "the random state"
    assert find_cost("CompiledFunctionBackward") is None
    assert find_cost(None) is None
