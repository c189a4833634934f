"""Layers whose backward is right pass, whatever they draw, remember, overwrite or return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrograd.tools.adjoint.adjoint_check import AdjointCheck, Verdict
from retrograd.tools.adjoint.check import check_adjoint
from tests.tools.adjoint.planted import saving


def names(check: AdjointCheck) -> set[str]:
    return {str(row.site) for row in check}


def all_agree(check: AdjointCheck) -> bool:
    """Every comparison was made, and found right where the batch is."""
    return {row.verdict for row in check} == {Verdict.OK}


LAYERS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "conv": lambda: (nn.Conv2d(3, 4, 3, stride=2, padding=1, groups=1), torch.randn(2, 3, 7, 7)),
    "grouped conv": lambda: (nn.Conv1d(4, 8, 3, groups=4, padding_mode="circular", padding=2), torch.randn(2, 4, 9)),
    "channels last": lambda: (nn.Conv2d(3, 4, 3), torch.randn(2, 3, 7, 7).to(memory_format=torch.channels_last)),
    "batch norm": lambda: (nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5)),
    "dropout": lambda: (nn.Dropout(0.4), torch.randn(4, 50)),
    "lstm": lambda: (nn.LSTM(4, 3, num_layers=2, dropout=0.3, bidirectional=True), torch.randn(5, 2, 4)),
    "gru with a state": lambda: (nn.GRU(4, 3), (torch.randn(5, 2, 4), torch.randn(1, 2, 3))),
    "embedding": lambda: (nn.Embedding(10, 4, padding_idx=0), torch.randint(10, (3, 5))),
    "sparse embedding": lambda: (nn.Embedding(10, 4, sparse=True), torch.randint(10, (3, 5))),
    "max pool with indices": lambda: (nn.MaxPool2d(2, return_indices=True), torch.randn(2, 3, 6, 6)),
    "relu in place": lambda: (nn.ReLU(inplace=True), torch.randn(4, 6)),
    "large relu": lambda: (nn.ReLU(), torch.randn(100_000)),
    "weight norm": lambda: (torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), torch.randn(2, 4)),
    "spectral norm": lambda: (torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), torch.randn(2, 4)),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)),
    "half precision": lambda: (nn.Linear(16, 8).bfloat16(), torch.randn(4, 16, dtype=torch.bfloat16)),
    "float64": lambda: (nn.Linear(5, 3).double(), torch.randn(4, 5, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_right_layer(name: str) -> None:
    torch.manual_seed(5)
    model, batch = LAYERS[name]()
    check = check_adjoint(model, batch)
    assert all_agree(check), check
    assert all(row.difference <= row.tolerance < 1e-3 for row in check), check


def test_every_argument_and_parameter_of_attention() -> None:
    torch.manual_seed(5)
    attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.2)
    query, key, value = torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    check = check_adjoint(attention, {"query": query, "key": key, "value": value, "attn_mask": torch.randn(3, 5)})
    assert all_agree(check), check
    assert names(check) == {
        "self:input.query", "self:input.key", "self:input.value", "self:input.attn_mask",
        "self:in_proj_weight", "self:in_proj_bias", "out_proj:weight", "out_proj:bias",
    }  # fmt: skip


def test_self_attention_stays_self_attention() -> None:
    x = torch.randn(2, 3, 8)
    check = check_adjoint(nn.MultiheadAttention(8, 2, batch_first=True), (x, x, x))
    (row,) = [row for row in check if row.site.slot == "input"]
    assert row.reason == "given as input.query and input.key and input.value"
    assert all_agree(check)


class Norm(nn.Module):
    """Casts to float32 inside, as the norms of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        single = x.float()
        return self.weight * (single * single.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x.dtype)


@pytest.mark.parametrize("seed", range(10))
def test_less_precision_inside_raises_no_false_alarm(seed: int) -> None:
    torch.manual_seed(seed)
    check = check_adjoint(nn.Sequential(nn.Linear(16, 16), Norm(), nn.Linear(16, 4)), torch.randn(4, 16), seed=seed)
    assert all_agree(check), check
    assert {row.precision for row in check if row.caller_name == "1"} == {"float32 inside"}
    assert {row.precision for row in check if row.caller_name == "2"} == {"float64"}


def test_a_block_of_llama() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=30
    )
    model, tokens = transformers.LlamaForCausalLM(config).train(), torch.randint(30, (2, 8))
    for seed in range(3):
        check = check_adjoint(model, {"input_ids": tokens, "labels": tokens}, seed=seed)
        assert check
        others = {(row.kind, row.verdict) for row in check if row.verdict is not Verdict.OK}
        assert others == {("LlamaRotaryEmbedding", Verdict.NOT_CHECKED)}, check  # positions, without a graph


def test_a_module_that_takes_no_float64() -> None:
    class Kernel(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is not torch.float32:
                raise TypeError("float32 only")
            return x.sin()

    check = check_adjoint(Kernel(), torch.randn(4, 16))
    assert all_agree(check)
    assert {row.precision for row in check} == {"float32"}
    assert "float32" in str(check)


def test_a_backward_that_takes_no_float64() -> None:
    def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        return gradient @ torch.eye(gradient.shape[1], dtype=torch.float32) @ weight.T, None

    weight, multiply = torch.randn(6, 3), saving(torch.matmul, backward)
    check = check_adjoint(lambda x: multiply(x, weight.to(x.dtype)), torch.randn(4, 6))
    assert all_agree(check), check
    assert {row.precision for row in check} == {"float32"}


def test_a_wrong_module_that_takes_no_float64() -> None:
    def sine(x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        return x.sin()

    wrong = saving(sine, lambda gradient, x: 0.9 * gradient * x.cos())
    (row,) = check_adjoint(wrong, torch.randn(4, 16)).faults
    assert row.precision == "float32"
    assert "0.9 times the right gradient" in row.reason


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).tanh())


def test_tied_weights() -> None:
    check = check_adjoint(Tied(), torch.randint(11, (2, 5)))
    assert all_agree(check), check
    assert names(check) == {"embedding:weight", "head:weight", "head:input.input"}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_blocks(use_reentrant: bool) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 6)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x

    check = check_adjoint(Blocks(), torch.randn(4, 6))
    assert all_agree(check), check
    assert {"self:input.x", "blocks.1.0:weight", "blocks.1.1:input.input"} <= names(check)


def test_nested_arguments_and_results() -> None:
    @dataclass
    class Pair:
        left: Tensor
        right: Tensor

    class Nested(nn.Module):
        def forward(self, inputs: dict[str, Any], *rest: Tensor, scale: Tensor) -> dict[str, Any]:
            left, right = inputs["pair"].left, inputs["pair"].right
            return {"sum": left * scale + rest[0], "more": [right.exp(), Pair(left, inputs["count"])]}

    batch = ({"pair": Pair(torch.randn(3), torch.randn(3)), "count": torch.arange(3)}, torch.randn(3))
    model = Nested()

    def call(inputs: dict[str, Any], *rest: Tensor) -> Any:
        return model(inputs, *rest, scale=torch.tensor(2.0, dtype=rest[0].dtype))

    check = check_adjoint(call, batch)
    assert all_agree(check), check
    assert names(check) == {"call:input.inputs.pair.left", "call:input.inputs.pair.right", "call:input.rest.0"}


def test_a_cache_that_is_no_nest_is_copied_for_each_evaluation() -> None:
    class Cache:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            cache.seen.append(self.fc(x))
            return torch.stack(cache.seen).sum(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            cache = Cache()
            for layer in self.layers:
                x = layer(x, cache)
            return x

    assert all_agree(check_adjoint(Net(), torch.randn(2, 4)))


def test_an_activation_that_was_put_aside_on_the_module() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.fc(x)
            return self.last

    model = Keeps()
    model(torch.randn(2, 4))
    assert all_agree(check_adjoint(model, torch.randn(2, 4)))


def test_a_mask_of_minus_infinity() -> None:
    def attend(scores: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(scores + mask, -1)

    mask = torch.full((4, 4), -torch.inf).triu(1)
    assert all_agree(check_adjoint(attend, (torch.randn(2, 4, 4), mask)))


def test_a_target_that_nobody_wants_the_gradient_of() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return (x - target.detach()).square().sum()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.loss = nn.Linear(3, 3), Loss()

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return self.loss(self.fc(x), target)

    check = check_adjoint(Net(), (torch.randn(2, 3), torch.randn(2, 3)), sites="loss")
    assert check
    verdicts = {str(row.site): row.verdict for row in check}
    assert verdicts == {"loss:input.x": Verdict.OK, "loss:input.target": Verdict.NOT_CHECKED}


def test_packed_sequences() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 6), torch.randn(2, 6)])
    check = check_adjoint(nn.LSTM(6, 3), packed)
    assert all_agree(check), check
    assert "self:input.input.data" in names(check)


def test_a_module_that_runs_inside_a_transform_says_so() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(self.fc)(x)

    check = check_adjoint(Mapped(), torch.randn(4, 6))
    assert {(str(row.site), row.verdict) for row in check} == {
        ("self:input.x", Verdict.OK),
        ("fc:output", Verdict.NOT_CHECKED),
    }
    assert "torch.func transform" in str(check)


def test_a_forward_that_takes_derivatives_itself() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            return torch.autograd.grad(self.fc(x).tanh().sum(), x, create_graph=True)[0]

    assert all_agree(check_adjoint(Force(), torch.randn(4, 6)))


def test_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        check = check_adjoint(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)), torch.randn(4, 6))
    assert all_agree(check), check


def test_a_block_of_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=12, vocab_size=30)
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.randint(30, (2, 8))
    check = check_adjoint(model, {"input_ids": tokens, "labels": tokens})
    assert all_agree(check), check
    assert {"transformer.h.1.attn.c_attn:weight", "transformer.h.1:input.hidden_states"} <= names(check)
