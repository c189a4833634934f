"""Context parallelism: each rank has a part of every sequence, and what is recorded is that of the whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from retrograd.core.recording.record import record
from retrograd.core.runs.reader import open_run
from tests.core.recording.spread import STEPS, Truth, assert_merged, make_optimizer, whole_numbers
from tests.processes import run_in_two

pytestmark = pytest.mark.slow

BATCH, LENGTH, WIDTH, HEADS = 2, 8, 8, 2
SITES = ("*:output", "*:output.grad", "*:weight*", "*:bias*")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        mixed: Tensor = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return y


def make_net() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).double()
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(whole_numbers(*parameter.shape, seed=number) / 8)
    return net


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    x, slope = (whole_numbers(BATCH, LENGTH, WIDTH, seed=seed + step) for seed in (100, 200))
    return x, slope


def loss_of(out: Tensor, slope: Tensor) -> Tensor:
    """A mean over the tokens at hand: its gradients, averaged over ranks, are those of the mean over all."""
    return (out * slope).sum() / out[..., 0].numel()


FLASH = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
FORWARD = ("query", "key", "value", "dropout_p", "is_causal")
BACKWARD = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")


def ring_attention(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """What torch does on CUDA devices with flash attention, with that of CPUs."""
    mesh = args[0].device_mesh
    local = [each.to_local() if isinstance(each, DTensor) else each for each in args]
    given: dict[str, Any]
    if op is FLASH[1]:
        given = {"grad_out_name": "grad_out", **dict(zip(BACKWARD, local, strict=True)), **kwargs}
        found = _attention._templated_ring_attention_backward(mesh.get_group(), 2, op, **given)
    else:
        given = {**dict(zip(FORWARD, local, strict=False)), **kwargs}
        found = _attention._templated_ring_attention(mesh.get_group(), 2, op, **given)
    return tuple(DTensor.from_local(each, mesh, [Shard(2)], run_check=False) for each in found)


@contextmanager
def rings_on_cpus() -> Iterator[None]:
    precise = _attention._cp_options.convert_to_f32
    handlers: dict[Any, Any] = _attention.custom_ops
    handlers.update(dict.fromkeys(FLASH, ring_attention))
    _attention._cp_options.convert_to_f32 = False
    try:
        yield
    finally:
        for op in FLASH:
            del handlers[op]
        _attention._cp_options.convert_to_f32 = precise


def train(rank: int, folder: Path, name: str) -> list[Tensor]:
    weights = []
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sequence",))
    for is_recorded in (True, False):
        model: Any = make_net()
        merge = name == "merged"
        recording = record(model, folder / "runs" / name, sites=SITES, merge_ranks=merge) if is_recorded else None
        model = fully_shard(model, mesh=mesh) if name == "FSDP2" else DistributedDataParallel(model)
        optimizer = make_optimizer(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, slope = batch_of(step)
            with rings_on_cpus(), context_parallel(mesh, buffers=[x, slope], buffer_seq_dims=[1, 1]):
                assert x.shape[1] == LENGTH // 2
                loss_of(model(x), slope).backward()
            optimizer.step()
        if recording is not None:
            recording.close()
        weights.append([each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    return [each.detach() for each in weights[0]]


def train_whole() -> Truth:
    truth = Truth(make_net())
    optimizer = make_optimizer(truth.net)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(truth.net(batch_of(step)[0]), batch_of(step)[1]).backward()
        truth.take_gradients()
        truth.update(optimizer)
    return truth


def test_parts_of_sequences_are_put_together(tmp_path: Path) -> None:
    names = ("DDP", "FSDP2", "merged")
    ran = run_in_two({name: partial(train, name=name) for name in names}, tmp_path)
    truth = train_whole()
    for name in names:
        for weights in ran[name]:
            for found, expected in zip(weights, truth.net.parameters(), strict=True):
                torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
        history = open_run(tmp_path / "runs" / name).history
        # A rank's loss is a mean over half of the tokens.
        assert_merged(
            history,
            truth,
            factor=lambda site: 2.0 if site.endswith("output.grad") else 1.0,
            is_exact=False,
            cancel={site for site in truth.seen if site.startswith("1.qkv:")},
        )
