import copy

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.explain import make_record as make_record_of
from retrograd.explaining.findings.record import CannotTell, Record
from tests.explaining.findings.by_hand import ask, check


@pytest.mark.parametrize("every", [1, 3])
def test_more_optimizers_than_are_noted_one_by_one(every: int) -> None:
    """Of 160 the first fifty are noted, and the last of these has all later updates: neither is a count."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    with rg.record(net) as recording:
        for _ in range(160):
            optimizer = torch.optim.Adam(net.parameters())
            for _ in range(every):
                optimizer.zero_grad()
                net(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
    [found] = ask("optimizer-made-anew", make_record_of(recording))
    often = "at every update" if every == 1 else "every 3 updates"
    assert f"Adam is created again at least 50 times for the same parameters, {often}" in found.message


def _train_folds(set_back: str, updates: int, *, width: int = 12, is_closed: bool = True) -> list[Finding]:
    """Four optimizers, one after the other, and what is found."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
    initial = copy.deepcopy(net.state_dict())
    x = torch.randn(64, 4)
    with rg.record(net) as recording:
        for _ in range(4):
            if set_back == "the same":
                net.load_state_dict(initial)
            elif set_back == "others":
                net.apply(lambda layer: layer.reset_parameters() if isinstance(layer, nn.Linear) else None)
            optimizer = torch.optim.Adam(net.parameters(), 1e-2)
            for _ in range(updates):
                optimizer.zero_grad()
                (net(x) - x.sum(1, True).sin()).square().mean().backward()
                optimizer.step()
        found = ask("optimizer-made-anew", make_record_of(recording))
    return ask("optimizer-made-anew", make_record_of(recording)) if is_closed else found


@pytest.mark.parametrize("updates", [5, 20])
@pytest.mark.parametrize("set_back", ["the same", "others"])
@pytest.mark.parametrize("width", [12, 2000])
def test_an_optimizer_for_each_fold_of_a_model_that_is_set_back_is_meant(
    set_back: str, updates: int, width: int
) -> None:
    assert not _train_folds(set_back, updates, width=width)


def test_an_optimizer_made_anew_where_the_weights_are_known_at_some_updates_alone() -> None:
    net = nn.Linear(4, 1)
    with rg.record(net, schedule=4) as recording:
        for _ in range(6):
            optimizer = torch.optim.Adam(net.parameters())
            for _ in range(4):
                optimizer.zero_grad()
                net(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
    with pytest.raises(CannotTell, match="the weights were not recorded"):
        check("optimizer-made-anew", make_record_of(recording))


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("updates", [2, 5, 6, 20])
def test_an_optimizer_made_anew_has_as_many_updates_while_it_is_recorded(updates: int, *, is_closed: bool) -> None:
    [found] = _train_folds("", updates, is_closed=is_closed)
    assert "Adam is created again 4 times" in found.message
    assert f"every {updates} updates" in found.message


def test_a_layer_that_is_frozen_while_training_goes_on() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(net.parameters())
    with rg.record(net) as recording:
        for step in range(20):
            net[2].requires_grad_(step < 10)
            optimizer.zero_grad()
            net(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
    assert not ask("optimizer-before-change", Record(recording.history))
