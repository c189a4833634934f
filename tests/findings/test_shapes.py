from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from retrograd.findings.explain import make_record
from retrograd.findings.record import CannotTell, Record
from retrograd.recording.record import record
from tests.findings.by_hand import ask, check
from tests.findings.programs import make_chain, make_program

LINEAR = ("linear", (-1, -1), ((8, 6), (1, 6)), (8, 1))


def chain(*listed: tuple[Any, ...], outputs: tuple[int, ...] = (0,)) -> Record:
    return make_program([make_chain(*listed, outputs=outputs)])


def test_a_difference_that_broadcasts() -> None:
    record = chain(
        LINEAR,
        ("sub", (0, -1), ((8, 1), (8,)), (8, 8)),
        ("pow", (1,), ((8, 8),), (8, 8)),
        ("mean", (2,), ((8, 8),), ()),
    )
    [found] = ask("broadcast-loss", record)
    assert (found.severity, found.line) == ("critical", "train.py:31")
    assert "float32[8, 1] and float32[8] broadcast to [8, 8] in sub" in found.message
    [found] = ask("broadcast-loss", chain(LINEAR, ("mse_loss", (0, -1), ((8, 1), (8,)), ())))
    assert "broadcast to [8, 8] in mse_loss" in found.message


@pytest.mark.parametrize(
    ("output", "target", "is_first"),
    [((8, 1), (8,), True), ((8,), (8, 1), True), ((8, 1), (8,), False), ((8,), (8, 1), False)],
)
def test_what_a_broadcast_loss_is_told_gives_one_shape(
    output: tuple[int, ...], target: tuple[int, ...], is_first: bool
) -> None:
    linear = ("linear", (-1, -1), ((8, 6), (1, 6)), output)
    operands, shapes = ((0, -1), (output, target)) if is_first else ((-1, 0), (target, output))
    [found] = ask("broadcast-loss", chain(linear, ("mse_loss", operands, shapes, ())))
    advice = found.repair.removeprefix("give both the same shape: ").removesuffix(".").split(", or ")
    for each in advice:
        tensors = {"output": torch.zeros(output), "target": torch.zeros(target)}
        name, method = each.split(".")
        tensors[name] = getattr(tensors[name], method.removesuffix("(1)"))(1)
        assert tensors["output"].shape == tensors["target"].shape
    assert len(advice) == 2


def test_shapes_that_are_meant_to_broadcast() -> None:
    same = chain(LINEAR, ("sub", (0, -1), ((8, 1), (8, 1)), (8, 1)), ("mean", (1,), ((8, 1),), ()))
    pairs = chain(LINEAR, ("sub", (0, 0), ((8, 1), (8,)), (8, 8)), ("mean", (1,), ((8, 8),), ()))
    bias = chain(LINEAR, ("add", (0, -1), ((8, 1), (1,)), (8, 1)), ("mean", (1,), ((8, 1),), ()))
    before = chain(
        ("mul", (-1, -1), ((8, 1), (8,)), (8, 8)), ("linear", (0, -1), ((8, 8), (1, 8)), (8, 1)), outputs=(1,)
    )
    for each in (same, pairs, bias, before):
        assert not ask("broadcast-loss", each)


def test_a_softmax_over_the_batch() -> None:
    two = ("linear", (-1, -1), ((8, 6), (2, 6)), (8, 2))
    over_batch = ("log_softmax", (0,), ((8, 2),), (8, 2), "dim=0")
    [found] = ask("wrong-dim", chain(two, over_batch, ("nll_loss", (1, -1), ((8, 2), "int64[8]"), ()), outputs=(1,)))
    assert "over dimension 0 of [8, 2], which is the batch" in found.message
    over_classes = ("log_softmax", (0,), ((8, 2),), (8, 2), "dim=-1")
    assert not ask("wrong-dim", chain(two, over_classes, ("nll_loss", (1, -1), ((8, 2), "int64[8]"), ()), outputs=(1,)))


def test_a_softmax_of_one() -> None:
    [found] = ask(
        "wrong-dim",
        chain(
            LINEAR,
            ("softmax", (0,), ((8, 1),), (8, 1), "dim=1"),
            ("binary_cross_entropy", (1, -1), ((8, 1), (8, 1)), ()),
        ),
    )
    assert "which has one element: its result is always 1" in found.message


SCORES = ("matmul", (-1, -1), ((8, 5, 4), (8, 4, 5)), (8, 5, 5))


@pytest.mark.parametrize(("dim", "wrong"), [("1", True), ("-2", True), ("-1", False), ("2", False), ("0", True)])
def test_attention_weights(dim: str, wrong: bool) -> None:
    record = chain(
        SCORES,
        ("softmax", (0,), ((8, 5, 5),), (8, 5, 5), f"dim={dim}"),
        ("dropout", (1,), ((8, 5, 5),), (8, 5, 5), "p=0.1, training=True"),
        ("matmul", (2, -1), ((8, 5, 5), (8, 5, 4)), (8, 5, 4)),
        ("mean", (3,), ((8, 5, 4),), ()),
        outputs=(3,),
    )
    assert len(ask("wrong-dim", record)) == wrong


@pytest.mark.parametrize(("dim", "wrong"), [("0", True), ("1", False)])
def test_attention_that_pools(dim: str, wrong: bool) -> None:
    record = chain(
        ("linear", (-1, -1), ((8, 5, 4), (1, 4)), (8, 5, 1)),
        ("squeeze", (0,), ((8, 5, 1),), (8, 5), "dim=-1"),
        ("softmax", (1,), ((8, 5),), (8, 5), f"dim={dim}"),
        ("unsqueeze", (2,), ((8, 5),), (8, 5, 1), "dim=-1"),
        ("mul", (3, 0), ((8, 5, 1), (8, 5, 4)), (8, 5, 4)),
        ("sum", (4,), ((8, 5, 4),), (8, 4), "dim=1"),
        ("linear", (5, -1), ((8, 4), (2, 4)), (8, 2)),
        ("mean", (6,), ((8, 2),), ()),
        outputs=(6,),
    )
    found = ask("wrong-dim", record)
    assert len(found) == wrong
    assert all("normalised by softmax over dimension 0, and summed over dimension 1" in each.message for each in found)


def test_weights_that_are_normalised_again() -> None:
    slots = chain(
        SCORES,
        ("softmax", (0,), ((8, 5, 5),), (8, 5, 5), "dim=1"),
        ("div", (1, -1), ((8, 5, 5), (8, 5, 1)), (8, 5, 5)),
        ("matmul", (2, -1), ((8, 5, 5), (8, 5, 4)), (8, 5, 4)),
        ("mean", (3,), ((8, 5, 4),), ()),
        outputs=(3,),
    )
    assert not ask("wrong-dim", slots)


def test_classes_in_the_last_dimension() -> None:
    logits = ("linear", (-1, -1), ((8, 7, 6), (7, 6)), (8, 7, 7))
    [found] = ask("wrong-dim", chain(logits, ("cross_entropy", (0, -1), ((8, 7, 7), "int64[8, 7]"), ())))
    assert "takes dimension 1 of [8, 7, 7] for classes" in found.message
    swapped = ("transpose", (0,), ((8, 7, 7),), (8, 7, 7), "1, 2")
    assert not ask("wrong-dim", chain(logits, swapped, ("cross_entropy", (1, -1), ((8, 7, 7), "int64[8, 7]"), ())))


@pytest.mark.parametrize(
    ("index", "first", "wrong"),
    [("(:, -1, :)", "False", 1), ("-1", "False", 0), ("(:, -1)", "True", 0), ("-1", "True", 1), ("0", "True", 0)],
)
def test_the_last_step_of_a_recurrent_layer(index: str, first: str, wrong: int) -> None:
    record = chain(
        ("lstm", (-1,), ((32, 9, 4),), (32, 9, 16), f"True, 1, 0.0, True, False, {first}"),
        ("getitem", (0,), ((32, 9, 16),), (32, 16), index),
        ("mean", (1,), ((32, 16),), ()),
        outputs=(1,),
    )
    assert len(ask("wrong-dim", record)) == wrong


@pytest.mark.parametrize(
    ("before", "behind", "mixes"),
    [
        ((32, 12, 6), (12, 32, 6), True),
        ((32, 12, 6), (32, 6, 12), True),
        ((32, 12, 24), (32, 4, 12, 6), True),
        ((32, 4, 12, 6), (32, 12, 24), True),
        ((32, 12, 24), (32, 12, 4, 6), False),
        ((32, 12, 4, 6), (32, 12, 24), False),
        ((32, 12, 6), (384, 6), False),
        ((32, 1, 12), (32, 12, 1), False),
        ((8, 8, 6), (8, 8, 6), False),
        ((32, 4, 24), (32, 4, 4, 6), False),
        ((32, 64), (32, 1, 8, 8), False),
    ],
)
def test_what_a_reshape_mixes(before: tuple[int, ...], behind: tuple[int, ...], mixes: bool) -> None:
    record = chain(("view", (-1,), (before,), behind), ("mean", (0,), (behind,), ()))
    assert len(ask("reshape-mixes-batch", record)) == mixes


def test_a_reshape_behind_a_permutation() -> None:
    swapped = ("permute", (-1,), ((32, 12, 6),), (12, 32, 6), "1, 0, 2")
    record = chain(swapped, ("reshape", (0,), ((12, 32, 6),), (32, 12, 6)), ("mean", (1,), ((32, 12, 6),), ()))
    assert not ask("reshape-mixes-batch", record)


def _stack(*widths: int, between: str = "dropout") -> Record:
    listed: list[tuple[Any, ...]] = []
    for number, (before, behind) in enumerate(pairwise(widths)):
        operand = 2 * number - 1
        listed.append(("linear", (operand, -1), ((8, before), (behind, before)), (8, behind)))
        listed.append((between, (2 * number,), ((8, behind),), (8, behind), "p=0.1"))
    last = len(listed) - 1
    listed.append(("cross_entropy", (last, -1), ((8, widths[-1]), "int64[8]"), ()))
    return chain(*listed, outputs=(last,))


def test_layers_without_an_activation() -> None:
    [found] = ask("missing-nonlinearity", _stack(6, 64, 64, 2))
    assert (found.severity, found.line) == ("warning", "train.py:32")
    assert "between the 3 affine layers" in found.message


def test_layers_that_need_no_activation() -> None:
    assert not ask("missing-nonlinearity", _stack(6, 64, 2, between="relu"))
    assert not ask("missing-nonlinearity", _stack(6, 64, 2, between="layer_norm"))
    assert not ask("missing-nonlinearity", _stack(64, 8, 64))
    assert not ask("missing-nonlinearity", _stack(6, 2))


def test_layers_of_a_stage_are_not_the_whole_model() -> None:
    staged = _stack(6, 64, 64, 2)
    staged.manifest["split"] = {"ranks": [], "stages": {"": 0}}
    with pytest.raises(CannotTell, match="stages of a pipeline"):
        check("missing-nonlinearity", staged)


@pytest.mark.parametrize("wrap", [spectral_norm, weight_norm, nn.Identity])
@pytest.mark.parametrize("between", [nn.Identity, nn.Tanh])
def test_layers_whose_weights_are_normalised(wrap: Any, between: Any) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.Linear(16, 16)]
    listed = layers if wrap is nn.Identity else [wrap(each) for each in layers]
    net = nn.Sequential(listed[0], between(), listed[1], between(), nn.Linear(16, 1))
    with record(net) as recording:
        net(torch.randn(8, 6)).square().mean().backward()
    net.eval()
    x, y = torch.randn(2, 8, 6)
    with torch.no_grad():
        bent = net(x + y) - net(x) - net(y) + net(torch.zeros(8, 6))  # 0 for what is affine
    assert len(ask("missing-nonlinearity", make_record(recording))) == bool(bent.abs().max() < 1e-5)


def test_weights_that_are_made_of_data() -> None:
    data = [("linear", (-1, -1), ((8, 6), (6, 6)), (8, 6)), ("tanh", (0,), ((8, 6),), (8, 6))]
    made = ("linear", (-1, 1), ((8, 6), (8, 6)), (8, 8))
    last = [("linear", (2, -1), ((8, 8), (9, 8)), (8, 9)), ("mean", (3,), ((8, 9),), ())]
    assert not ask("missing-nonlinearity", chain(*data, made, *last, outputs=(3,)))


@pytest.mark.parametrize(("dim", "wrong"), [("0", True), ("-1", False), ("1", False)])
def test_a_gate_that_picks_experts(dim: str, wrong: bool) -> None:
    record = chain(
        ("linear", (-1, -1), ((8, 5), (3, 5)), (8, 3)),
        ("softmax", (0,), ((8, 3),), (8, 3), f"dim={dim}"),
        ("max", (1,), ((8, 3),), (8,), "dim=-1"),
        ("mul", (2, -1), ((8,), (8,)), (8,)),
        ("linear", (3, -1), ((8,), (8,)), (8,)),
        ("mean", (4,), ((8,),), ()),
        outputs=(4,),
    )
    assert len(ask("wrong-dim", record)) == wrong


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("along", [0, 1])
def test_vectors_that_are_normalised_for_their_products(dim: int, along: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.normalize(self.fc(x), dim=dim)

    net = Net()
    with record(net) as recording:
        one, other = net(torch.randn(8, 6)), net(torch.randn(8, 6))
        product = one @ other.t() if along == 1 else one.T @ other
        product.square().mean().backward()
    largest = (one @ one.t() if along == 1 else one.T @ one).diagonal()
    is_cosine = bool(torch.allclose(largest, torch.ones(len(largest))))
    assert len(ask("wrong-dim", make_record(recording))) == (not is_cosine)
