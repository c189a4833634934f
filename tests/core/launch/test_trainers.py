"""Training loops that are not the script's own."""

from __future__ import annotations

import importlib.util

import pytest

from tests.core.launch.recorded import Outcome, outputs, parameters, recorded, steps

NET = outputs("body.0", "body.1", "body", "head", "self") | parameters("body.0", "head")


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.mark.slow
@needs("transformers")
@recorded("hf_trainer.py out")
def test_the_trainer_of_transformers(outcome: Outcome) -> None:
    assert outcome.moments() == steps(3, micros=2)
    layers = [f"model.layers.{layer}.{part}" for layer in range(2) for part in ("self_attn.q_proj", "mlp.up_proj")]
    assert outcome.sites() >= outputs("model.embed_tokens", "lm_head", *layers)
    assert outcome.sites() >= parameters("lm_head", *layers, names=("weight",))
    assert {"self:output.logits", "self:output.logits.grad", "self:output.loss"} <= outcome.sites()


@pytest.mark.slow
@needs("accelerate")
@recorded("accelerated.py", "accelerate launch --cpu accelerated.py")
def test_accelerate(outcome: Outcome) -> None:
    accumulated = {site.replace(".update", ".accumulated") for site in NET if site.endswith(".update")}
    assert outcome.sites() == NET | accumulated
    assert outcome.moments() == steps(2, micros=2)


@pytest.mark.slow
@needs("lightning")
@recorded("lightning_fit.py")
def test_lightning_calls_only_an_inner_net(outcome: Outcome) -> None:
    paths = ("net.body.0", "net.body.1", "net.body", "net.head", "net")
    assert outcome.sites() == outputs(*paths) | parameters("net.body.0", "net.head")
    assert outcome.moments() == steps(3)
