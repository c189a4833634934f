"""Every kind of point is seen where a forward meets it, and nowhere else, in a forward and in its graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from retrograd.explaining.kinks.kinks import find_kinks
from retrograd.explaining.kinks.look import Look, Sighting
from retrograd.explaining.kinks.point import Convention, Point, key_of
from retrograd.explaining.kinks.table import POINTS
from tests.explaining.kinks.test_table import function_of, place

pytestmark = pytest.mark.filterwarnings("ignore:(std|var).*degrees of freedom")

FOUND = [pytest.param(point, id=str(point)) for point in POINTS if point.find is not None]
ALWAYS = {"everywhere", "of too few numbers"}
UNDEFINED = ("below", "beyond", "negative", "of −∞", "after −∞", "both are −∞")


def run(point: Point, x: Tensor) -> tuple[Tensor, list[Sighting]]:
    seen: list[Sighting] = []
    with Look(seen.append):
        result = function_of(point)(x.requires_grad_())
    return result, [each for each in seen if each.point is point and each.lie_there.any()]


@pytest.mark.parametrize("point", FOUND)
def test_it_is_seen_where_it_is(point: Point) -> None:
    _, seen = run(point, place(point))
    assert len(seen) == 1


@pytest.mark.parametrize("point", FOUND)
def test_its_node_is_told(point: Point) -> None:
    result, (sighting,) = run(point, place(point))
    nodes = {}
    waiting = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes.values():
            nodes[node._sequence_nr()] = node
            waiting += [each for each, _ in node.next_functions]
    assert key_of(nodes[sighting.number].name()) in point.keys


@pytest.mark.parametrize("point", [each for each in FOUND if each.values[0].where not in ALWAYS])
def test_it_is_not_seen_elsewhere(point: Point) -> None:
    count = len(point.at)
    if any(text in point.where for text in UNDEFINED):
        x = torch.linspace(0.3, 0.4, count, dtype=torch.float64)
        x = x + 1 if point.operation == "acosh" else x
    else:
        x = place(point).nan_to_num(posinf=0, neginf=0) * 0.9 + torch.linspace(0.03, 0.07, count, dtype=torch.float64)
    assert not run(point, x)[1]


def test_no_point_is_known_for_what_has_its_gradient() -> None:
    assert not [point for point in POINTS if point.convention is Convention.GRADIENT and point.find]


IN_PLACE = {
    "relu_": lambda x: functional.relu_(x * 1),
    "clamp_": lambda x: (x * 1).clamp_(0, 1),
    "sqrt_": lambda x: (x * 1).sqrt_(),
    "relu behind a function": lambda x: functional.relu(Twice.apply(x)),
}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.abs() * 2

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_and_behind_functions(name: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3))

        def forward(self) -> Tensor:
            return IN_PLACE[name](self.weight)

    (kink,) = find_kinks(Model(), ())
    assert kink.value == 3
    assert name.startswith(kink.operation)


TIES = torch.tensor([[2.0, 2, 1, 0], [1, 1, 1, 1], [0, 3, 3, 3], [5, 4, 3, 2]])

POOLS = {
    "plain": ({"kernel_size": 2}, (2, 2)),
    "stride": ({"kernel_size": 2, "stride": 1}, (2, 2)),
    "padding": ({"kernel_size": 3, "stride": 2, "padding": 1}, (3, 3)),
    "dilation": ({"kernel_size": 2, "dilation": 2, "stride": 1}, (2, 2)),
    "ceil": ({"kernel_size": 3, "ceil_mode": True}, (3, 3)),
}


@pytest.mark.parametrize("name", POOLS)
def test_ties_in_windows_are_counted_as_by_hand(name: str) -> None:
    """Held against windows that are cut out one by one."""
    options, (height, width) = POOLS[name]
    x = torch.randint(0, 3, (2, 3, 7, 8), generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    seen: list[Sighting] = []
    with Look(seen.append):
        pooled = functional.max_pool2d(x, **options)  # type: ignore[arg-type]
    stride, padding = options.get("stride", options["kernel_size"]), options.get("padding", 0)
    apart = options.get("dilation", 1)
    ties = torch.zeros(pooled.shape, dtype=torch.bool)
    for index in torch.cartesian_prod(*map(torch.arange, pooled.shape)).tolist():
        image, (row, column) = x.detach()[index[0], index[1]], (place * stride - padding for place in index[2:])
        cut = [
            image[row + apart * i, column + apart * j]
            for i in range(height)
            for j in range(width)
            if 0 <= row + apart * i < 7 and 0 <= column + apart * j < 8
        ]
        ties[tuple(index)] = sum(each == max(cut) for each in cut) > 1
    (sighting,) = seen
    found = sighting.lie_there[..., : pooled.shape[2], : pooled.shape[3]]
    assert torch.equal(found, ties)


@pytest.mark.parametrize("largest", [True, False])
def test_ties_of_topk(largest: bool) -> None:
    seen: list[Sighting] = []
    with Look(seen.append):
        TIES.clone().requires_grad_().topk(2, largest=largest)
    (sighting,) = seen
    tied = [[2, 2], [1, 1, 1, 1], [3, 3, 3], []] if largest else [[], [1, 1, 1, 1], [3, 3, 3], []]
    assert [TIES[row][sighting.lie_there[row]].tolist() for row in range(4)] == tied


def test_what_has_no_graph_is_not_seen() -> None:
    seen: list[Sighting] = []
    with Look(seen.append):
        torch.zeros(3).relu()
        with torch.no_grad():
            torch.zeros(3, requires_grad=True).relu()
    assert not seen


def test_looking_changes_nothing() -> None:
    x = torch.randn(5, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        y = functional.dropout(x.relu().sqrt().clamp(0, 1), 0.5).sum()
        return y, torch.autograd.grad(y, x)[0]

    plain = step()
    with Look(lambda sighting: None):
        looked_at = step()
    assert torch.equal(plain[0], looked_at[0])
    assert torch.equal(plain[1].nan_to_num(), looked_at[1].nan_to_num())
    assert torch._C._len_torch_dispatch_stack() == 0
