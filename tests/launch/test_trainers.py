"""Training loops that are not the script's own."""

from __future__ import annotations

import pytest

from tests.launch.conftest import Record
from tests.launch.recorded import outputs, parameters

NET = outputs("body.0", "body.1", "body", "head", "self") | parameters("body.0", "head")


@pytest.mark.slow
def test_the_trainer_of_transformers(record: Record) -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    outcome = record("hf_trainer.py", "out")
    assert outcome.moments() == [(step, micro) for step in range(3) for micro in range(2)]
    layers = [f"model.layers.{layer}.{part}" for layer in range(2) for part in ("self_attn.q_proj", "mlp.up_proj")]
    assert outcome.sites() >= outputs("model.embed_tokens", "lm_head", *layers)
    assert outcome.sites() >= parameters("lm_head", *layers, names=("weight",))
    assert {"self:output.logits", "self:output.logits.grad", "self:output.loss"} <= outcome.sites()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), ("accelerate", "launch", "--cpu")], ids=["python", "accelerate launch"])
def test_accelerate(record: Record, launcher: tuple[str, ...]) -> None:
    pytest.importorskip("accelerate")
    outcome = record(*launcher, "accelerated.py")
    assert outcome.sites() == NET
    assert outcome.moments() == [(step, micro) for step in range(2) for micro in range(2)]


@pytest.mark.slow
def test_lightning_calls_only_an_inner_net(record: Record) -> None:
    pytest.importorskip("lightning")
    outcome = record("lightning_fit.py")
    paths = ("net.body.0", "net.body.1", "net.body", "net.head", "net")
    assert outcome.sites() == outputs(*paths) | parameters("net.body.0", "net.head")
    assert outcome.moments() == [(step, 0) for step in range(3)]
