from __future__ import annotations

import math
import operator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from retrograd.core.errors import NoSuchNodeError, PatternError
from retrograd.following.graph.node import Edge, Line, Node, count_nonfinite, holds_nonfinite, norm_of
from retrograd.following.stepping.breakpoints import Stop, parse_breakpoint
from tests.following.graph.by_hand import make_graph

NODES = [
    Node(0, "SumBackward0", 5, edges=(Edge(1, 0),)),
    Node(
        1,
        "MulBackward0",
        4,
        edges=(Edge(2, 0),),
        module="blocks.3.attn",
        call=2,
        line=Line("/home/me/net/model.py", 30, "f"),
    ),
    Node(2, "AccumulateGrad", None, parameter="blocks.3.attn.scale"),
]
COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
GRAPH = make_graph(NODES, [Edge(0, 0)])

OWNER = SimpleNamespace(graph=GRAPH)


def stops(*incoming: Tensor | None) -> list[Stop]:
    return [Stop(OWNER, index, index, incoming) for index in range(len(GRAPH))]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("blocks.3*", [1, 2]),
        ("*:MulBackward0", [1]),
        ("blocks.3.attn:Mul*", [1]),
        ("blocks.3.attn", [1]),
        ("blocks.3.attn#2:MulBackward0", [1]),
        ("SumBackward0", [0]),
        ("*.scale", [2]),
        ("kind MulBackward0", [1]),
        ("kind  *Backward0 ", [0, 1]),
        ("line model.py:30", [1]),
        ("line net/model.py:30", [1]),
        ("line /home/me/net/model.py:30", [1]),
        ("*", [0, 1, 2]),
    ],
)
def test_places(text: str, found: list[int]) -> None:
    point = parse_breakpoint(text)
    assert [stop.index for stop in stops() if point(stop)] == found
    assert [stop.index for stop in stops() if point.within(GRAPH)(stop)] == found


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("blocks.4.attn", "blocks.3.attn"),
        ("kind MilBackward0", "MulBackward0"),
        ("line model.py:31", "30"),
        ("line odel.py:30", "record_origins"),
    ],
)
def test_places_that_are_not_there(text: str, near: str) -> None:
    with pytest.raises(NoSuchNodeError) as raised:
        parse_breakpoint(text).within(GRAPH)
    assert near in raised.value.repair


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "norm",
        "norm > ",
        "norm >> 3",
        "norm = 3",
        "norm > much",
        "norm>",
        "line",
        "line model.py",
        "kind",
        "a b",
    ],
)
def test_texts_that_are_none(text: str) -> None:
    with pytest.raises(PatternError) as raised:
        parse_breakpoint(text)
    assert "norm > 100" in raised.value.repair


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), max_size=5),
    st.sampled_from([">", ">=", "<", "<="]),
    st.floats(0, 1e3, width=32),
)
def test_norms(values: list[float], sign: str, limit: float) -> None:
    incoming = [torch.tensor(values, dtype=torch.float64), None, torch.tensor([3.0, 4.0])]
    norm = norm_of(incoming)
    assert norm is not None
    assert math.isclose(norm, math.sqrt(sum(value**2 for value in values) + 25))
    point = parse_breakpoint(f"norm {sign} {limit}")
    assert point(stops(*incoming)[0]) == COMPARE[sign](norm, limit)


@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(3),
        torch.full((4,), 3e38),
        torch.full((4,), 6e4, dtype=torch.float16),
        torch.zeros(0),
        torch.tensor([1, 2]),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, device="meta"),
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
)
def test_what_is_finite_of_every_kind(gradient: Tensor) -> None:
    assert not holds_nonfinite([gradient, None])
    assert count_nonfinite(gradient) in (0, None)
    norm_of([gradient])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not(dtype: torch.dtype, value: float) -> None:
    gradient = torch.ones(3, dtype=dtype)
    gradient[1] = value
    point = parse_breakpoint("non-finite")
    assert point(stops(None, gradient)[0])
    assert count_nonfinite(gradient) == 1
    assert point(stops(gradient.to_sparse())[0])
