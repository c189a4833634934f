"""Histograms around zero, held against numpy on the tensors themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.history.data_facts import SignedHistogram
from retrograd.core.history.history import History


def train(net: nn.Module, data: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for batch in data:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8), nn.Tanh())


def record(data: list[torch.Tensor], net: nn.Module | None = None) -> History:
    net = make_net() if net is None else net
    with rg.record(net, tensors="*:output") as recording:
        train(net, data)
    return recording.history


def counted(found: SignedHistogram, values: np.ndarray) -> list[int]:
    """What numpy counts between the edges of a histogram, and beyond them."""
    finite = values[np.isfinite(values)]
    low, high = found.edges[0], found.edges[-1]
    inside = np.histogram(finite[finite < high], found.edges)[0]
    return [int((finite < low).sum()), *inside.tolist(), int((finite >= high).sum()), int((~np.isfinite(values)).sum())]


@pytest.mark.parametrize("site", ["0:output", "1:output", "3:output", "self:output"])
def test_bins_are_those_of_numpy(site: str) -> None:
    history = record([torch.randn(32, 16) for _ in range(20)])
    found, kept = history[site].signed_histograms, {each.step: each.tensor for each in history[site].tensors}
    assert [each.step for each in found] == [0, 1, 2, 4, 8, 16]
    for each in found:
        tensor = kept[each.step]
        assert tensor is not None
        values = tensor.detach().double().numpy().ravel()
        assert list(each.counts) == counted(each, values)
        assert each.elements == len(values)
        assert each.value == pytest.approx(4 * np.sqrt(np.square(values).mean()), rel=1e-5)


def test_a_one_sided_activation_has_nothing_below_zero() -> None:
    [first, *_] = record([torch.randn(32, 16)])["1:output"].signed_histograms
    assert first.bins[:16].sum() == 0 < first.bins[16]
    assert first.edges[16] == 0.0


@pytest.mark.parametrize("odd", [[float("nan")], [float("inf"), -float("inf")], [3e38], [0.0]])
def test_numbers_that_are_not_finite_are_counted_apart(odd: list[float]) -> None:
    values = torch.zeros(4, 16)
    values.view(-1)[: len(odd)] = torch.tensor(odd)
    [found] = record([values], nn.Sequential(nn.Identity(), nn.Linear(16, 2)))["0:output"].signed_histograms
    assert sum(found.counts) == 64
    assert found.counts[34] == (~torch.isfinite(torch.tensor(odd))).sum()
    assert np.isfinite(found.edges).all()


def test_of_a_large_tensor_elements_of_all_channels_are_counted() -> None:
    values = torch.arange(1024.0).repeat(256, 1) - 511.5
    [found] = record([values], nn.Sequential(nn.Identity(), nn.Linear(1024, 2)))["0:output"].signed_histograms
    assert found.elements == 256 * 1024
    assert 4_096 < sum(found.counts) <= 8_192
    inside = found.bins[found.bins > 0][1:-1]
    assert inside.max() <= 1.2 * inside.min()


def test_more_samples_than_are_counted_at_once() -> None:
    net = nn.Sequential(*(nn.Tanh() for _ in range(70)), nn.Linear(8192, 2))
    history = record([torch.randn(1, 8192)], net)
    for number in range(70):
        [found], [kept] = history[f"{number}:output"].signed_histograms, history[f"{number}:output"].tensors
        assert kept.tensor is not None
        assert list(found.counts) == counted(found, kept.tensor.detach().double().numpy().ravel())


def test_a_run_on_disk_has_them_and_its_page_draws_them(tmp_path: Path) -> None:
    net = make_net()
    data = [torch.randn(8, 16) for _ in range(5)]
    with rg.record(net, tmp_path / "run"):
        train(net, data)
    found = rg.open_run(tmp_path / "run").history["1:output"].signed_histograms
    assert [each.step for each in found] == [0, 1, 2, 4]
    assert 'id="block-signed"' in rg.write_report(tmp_path / "run").read_text()


def test_training_is_the_same_with_and_without() -> None:
    data = [torch.randn(8, 16) for _ in range(5)]
    plain, recorded = make_net(), make_net()
    train(plain, data)
    record(data, recorded)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), recorded.parameters(), strict=True))


def test_evaluation_and_other_sites_have_none() -> None:
    net = make_net()
    with rg.record(net) as recording, torch.no_grad():
        net.eval()(torch.randn(2, 16))
        net.train()
    assert recording.history.signed_histograms() == {}
    assert record([torch.randn(2, 16)])["0:weight.grad"].signed_histograms == []
