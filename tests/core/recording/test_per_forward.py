"""Forwards without grad that have a record each: the tokens of a generation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg


class Decoder(nn.Module):
    """Adds what it has read to a state, and says a next token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cell, self.head = nn.Embedding(10, 8), nn.GRUCell(8, 8), nn.Linear(8, 10)

    def forward(self, token: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        for each in token:
            state = self.cell(self.embed(each)[None], state)
        assert state is not None
        return self.head(state)[0].argmax(-1, keepdim=True), state


def generate(model: Decoder, prompt: list[int], tokens: int) -> list[Tensor]:
    """What the head gives for each token."""
    found: list[Tensor] = []
    hook = model.head.register_forward_hook(lambda module, args, output: found.append(output.clone()))
    token, state = torch.tensor(prompt), None
    for _ in range(tokens):
        token, state = model(token, state)
    hook.remove()
    return found


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_each_token_has_its_number(mode: str) -> None:
    model = Decoder().eval()
    guard = torch.no_grad() if mode == "no_grad" else torch.inference_mode()
    with (
        guard,
        rg.record(model, sites=["*:output", "*:output.*"], tensors="head:output", per_forward=True) as recording,
    ):
        outputs = generate(model, [1, 2, 3], 4)
    series = recording.history["head:output"]
    assert [kept.micro for kept in series.tensors] == [0, 1, 2, 3]
    for number, (kept, output) in enumerate(zip(series.tensors, outputs, strict=True)):
        assert kept.tensor is not None
        assert torch.equal(kept.tensor, output)
        of_token = series.select(phase=mode, micro=number)  # type: ignore[arg-type]
        assert of_token.rms.tolist() == pytest.approx([output.square().mean().sqrt().item()])
    assert series.select(phase=mode).count.tolist() == [4 * 10]  # type: ignore[arg-type]
    cell = recording.history["cell:output"].select(phase=mode, micro=0)  # type: ignore[arg-type]
    assert cell.count.tolist() == [3 * 8]  # the prompt is read in one forward
    numbers = recording.history.table().to_pandas().query("site == 'cell#2:output'").micro
    assert numbers.tolist() == [0]


def test_they_are_numbered_anew_in_each_step() -> None:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rg.record(model, sites="head:output", per_forward=True) as recording:
        for _ in range(2):
            model.embed.weight.square().sum().backward()
            optimizer.step()
            model.cell(torch.randn(1, 8)).sum().backward()
            with torch.no_grad():
                generate(model, [1], 3)
    rows = recording.history.table().to_pandas()
    assert sorted(zip(rows.step, rows.micro, rows.phase, strict=True)) == [
        (step, micro, "no_grad") for step in sorted(set(rows.step)) for micro in range(3)
    ]
    assert len(rows) == 6


def test_a_prompt_is_a_step_where_somebody_says_so() -> None:
    model = Decoder()
    with torch.no_grad(), rg.record(model, sites="head:output", per_forward=True) as recording:
        for prompt in range(2):
            recording.begin_step(prompt)
            generate(model, [1, 2], 3)
    rows = recording.history.table().to_pandas()
    assert list(zip(rows.step, rows.micro, strict=True)) == [(step, micro) for step in range(2) for micro in range(3)]


def test_otherwise_they_merge() -> None:
    model = Decoder()
    with torch.no_grad(), rg.record(model, sites="head:output") as recording:
        generate(model, [1], 3)
    assert recording.history.table().to_pandas().micro.tolist() == [0]


def test_generate_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=16, bos_token_id=0, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    site = "transformer.h.0.attn/scaled_dot_product_attention:output"
    with rg.record(model, sites=site, tensors="transformer.ln_f:output", per_forward=True) as recording:
        model.generate(torch.arange(1, 5)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
    kept = recording.history["transformer.ln_f:output"].tensors
    assert [(each.micro, each.tensor.shape[1]) for each in kept] == [(0, 4), (1, 1), (2, 1), (3, 1)]
    counts = [recording.history[site].select(phase="no_grad", micro=each).count.tolist() for each in range(4)]
    assert counts == [[4 * 8], [8], [8], [8]]
