"""Features in two processes, of models that are replicated or sharded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from retrograd.core.errors import FeatureError
from retrograd.tools.features.dataset import extract_dataset
from retrograd.tools.features.extractor import extract
from tests.processes import Work, run_in_two

pytestmark = pytest.mark.slow

SITES = ["0", "1.*", "2:input.input"]
DATA = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), nn.Linear(4, 2))


def wrap(kind: str) -> nn.Module:
    net = make_net().eval()
    if kind == "ddp":
        return DistributedDataParallel(net)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(net[1], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def extract_batches(rank: int, folder: Path, kind: str) -> list[dict[str, Tensor]]:
    model = wrap(kind)
    return [extract(model, DATA[rank::2], SITES) for _ in range(2)]


def extract_and_train(rank: int, folder: Path, kind: str) -> dict[str, Tensor]:
    """Gradients through features, and then a step as ever."""
    model = wrap(kind)
    feature = extract(model, DATA[rank::2], "1", differentiable=True)["1"]
    assert feature.requires_grad
    del feature
    model(DATA[rank::2]).square().mean().backward()
    return {
        name.removeprefix("module."): each.grad.full_tensor() if hasattr(each.grad, "full_tensor") else each.grad  # type: ignore[misc,union-attr]
        for name, each in model.named_parameters()
    }


def store(rank: int, folder: Path, kind: str) -> Tensor:
    """Twice, for the second time only opens what the first has written."""
    model = wrap(kind)
    loader = DataLoader(TensorDataset(DATA), batch_size=2, sampler=DistributedSampler(DATA, shuffle=False))  # type: ignore[arg-type]
    for _ in range(2):
        stored = extract_dataset(model, loader, "1", folder / f"{kind}{rank}", progress=False)
    return stored["1"][:]


def store_in_one_folder(rank: int, folder: Path) -> str:
    """The second process comes when the first has done."""
    model = wrap("ddp")
    loader = DataLoader(TensorDataset(DATA), batch_size=2, sampler=DistributedSampler(DATA, shuffle=False))  # type: ignore[arg-type]
    if rank == 0:
        extract_dataset(model, loader, "1", folder / "shared", progress=False)
    torch.distributed.barrier()
    if rank == 0:
        return ""
    with pytest.raises(FeatureError) as caught:
        extract_dataset(model, loader, "1", folder / "shared", progress=False)
    return str(caught.value)


KINDS = ["ddp", "fsdp"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    works: dict[str, Work] = {"one folder": store_in_one_folder}
    for kind in KINDS:
        works |= {
            f"batch-{kind}": partial(extract_batches, kind=kind),
            f"train-{kind}": partial(extract_and_train, kind=kind),
            f"store-{kind}": partial(store, kind=kind),
        }
    return run_in_two(works, tmp_path_factory.mktemp("processes"))


def by_hand(x: Tensor) -> dict[str, Tensor]:
    net = make_net()
    with torch.no_grad():
        stem = net[0](x)
        linear = net[1][0](stem)
        relu = linear.relu()
    return {"0": stem, "1.0": linear, "1.1": relu, "2:input.input": relu}


@pytest.mark.parametrize("kind", KINDS)
def test_batches(found: dict[str, list[Any]], kind: str) -> None:
    for rank in range(2):
        expected = by_hand(DATA[rank::2])
        for features in found[f"batch-{kind}"][rank]:
            assert list(features) == list(expected)
            for name, each in expected.items():
                assert torch.equal(features[name], each)


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_behind_it(found: dict[str, list[Any]], kind: str) -> None:
    net = make_net()
    shares = []
    for rank in range(2):
        loss = net(DATA[rank::2]).square().mean()
        shares.append(torch.autograd.grad(loss, list(net.parameters())))
    for (name, _), one, other in zip(net.named_parameters(), *shares, strict=True):
        for rank in range(2):
            torch.testing.assert_close(found[f"train-{kind}"][rank][name], one / 2 + other / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_each_process_stores_its_part(found: dict[str, list[Any]], kind: str) -> None:
    for rank in range(2):
        torch.testing.assert_close(found[f"store-{kind}"][rank], by_hand(DATA[rank::2])["1.1"])


def test_the_folder_of_another_process_is_refused(found: dict[str, list[Any]]) -> None:
    """Else it would be given the features of other samples."""
    assert "'0 of 2' there, '1 of 2' now" in found["one folder"][1]
