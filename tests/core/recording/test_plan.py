"""``rg.plan_recording``: what would be recorded, before anything runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.errors import NoSuchSiteError


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def test_the_plan_is_what_is_then_recorded() -> None:
    net = make_net()
    planned = [site.name for site in rg.plan_recording(net).sites if site.statistics]
    with rg.record(net) as recording:
        net(torch.ones(2, 3)).sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert sorted(planned) == sorted(recording.history.sites)


def test_sizes_of_parameters_are_known_and_those_of_activations_are_not() -> None:
    sizes = {site.name: site.elements for site in rg.plan_recording(make_net()).sites}
    assert sizes["0:weight.grad"] == 12
    assert sizes["0:output"] is None


def test_it_can_be_read() -> None:
    text = str(rg.plan_recording(make_net(), sites=["0:output", "0:weight.grad"], tensors="0:weight"))
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["0:output", "0:weight", "0:weight.grad"]
    assert "when it runs" in lines[1]
    assert lines[-1].startswith("3 sites; statistics: ")
    assert "tensors of 1 site," in lines[-1]


def test_bytes_are_those_of_rows() -> None:
    with_bins, without = (
        rg.plan_recording(make_net(), sites="0:output", histogram=histogram) for histogram in (True, False)
    )
    assert (without.bytes_per_step, with_bins.bytes_per_step) == (112, 112 + 255 * 8)
    assert rg.plan_recording(make_net(), sites="*").memory > with_bins.memory


def test_a_plan_of_nothing_is_an_error() -> None:
    with pytest.raises(NoSuchSiteError, match="0:output"):
        rg.plan_recording(make_net(), sites="0:outptu")
