"""What was asked for and is not there is told at the end, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.errors import NoSuchSiteError, RetrogradWarning
from tests.core.recording.collector import Collector, collect


class Net(nn.Module):
    """Has a part that is never called, one that is called another way, and one that returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.fc(x) + self.frozen(x)}


def run(**choices: Any) -> tuple[Collector, dict[str, str]]:
    net = Net()
    with collect(net, **choices) as seen:
        rg.watch("x", torch.ones(1))
        net(torch.ones(2, 3))["logits"].sum().backward()
    return seen, {item["site"]: item["reason"] for item in seen.facts["not_recorded"]}


def test_every_reason() -> None:
    _, reasons = run()
    never = "the module was never called while a step was recorded"
    nothing = "no gradient came: it did not require grad, or no backward pass reached it"
    still = "no optimizer of torch.optim has updated the parameter"
    frozen = "the parameter is frozen"
    assert reasons == {
        "fc:weight.update": still,
        "fc:bias.update": still,
        "unused:output": never,
        "unused:output.grad": never,
        "unused:weight.grad": nothing,
        "unused:weight.update": still,
        "unused:bias.grad": nothing,
        "unused:bias.update": still,
        "frozen:output.grad": nothing,
        "frozen:weight.grad": frozen,
        "frozen:weight.update": frozen,
        "frozen:bias.grad": frozen,
        "frozen:bias.update": frozen,
    }


def test_what_was_not_asked_for_is_not_missed() -> None:
    _, reasons = run(sites=["fc:output*", "self:output.logits"])
    assert reasons == {}


def test_patterns_that_never_matched() -> None:
    nothing = "nothing matched this pattern while the model ran"
    _, reasons = run(sites=["fc:output", "self:output.loss", "fc#2:output", "watch/*", "watch/y", "re:output.z$"])
    assert reasons == {
        "'self:output.loss'": nothing,
        "'fc#2:output'": nothing,
        "'watch/y'": nothing,
        "'re:output.z$'": nothing,
    }


def test_tensors_that_were_asked_for_are_missed_too() -> None:
    seen, reasons = run(sites="fc:output", tensors=["unused:output", "self:output.logits", "self:output.loss"])
    assert [item.site for item in seen.tensors] == ["self:output.logits"]
    assert set(reasons) == {"unused:output", "'self:output.loss'"}


def test_all_is_well() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with collect(net) as seen:
        net(torch.ones(1, 3)).sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert seen.facts["not_recorded"] == []


@pytest.mark.parametrize("pattern", ["fc#7:output.grad", "fc#2:outputs", "re:#3:output", "fc#2"])
def test_a_call_that_never_came_is_told(pattern: str) -> None:
    net = Net()
    with pytest.warns(rg.RetrogradWarning, match="Nothing was recorded at"), rg.record(net, sites=pattern) as recording:
        net(torch.ones(2, 3))["logits"].sum().backward()
    (missed,) = recording.history.manifest["not_recorded"]
    assert pattern.removeprefix("re:") in missed["site"]
    with pytest.raises(NoSuchSiteError):
        recording.history["fc#7:output.grad"]


def test_the_first_call_by_its_number_is_recorded() -> None:
    net = Net()
    with rg.record(net, sites="fc#1:output*", tensors="fc#1:outputs.grad") as recording:
        net(torch.ones(2, 3))["logits"].sum().backward()
    assert recording.history.manifest["not_recorded"] == []
    assert len(recording.history["fc#1:output.grad"].tensors) == 1
    assert recording.history["fc:output"].steps.tolist() == [0]


def test_arguments_that_are_no_tensors_are_not_planned_for() -> None:
    planned = [site.name for site in rg.plan_recording(nn.MultiheadAttention(4, 2), sites="*:input*").sites]
    assert "self:input.attn_mask" in planned
    assert not [name for name in planned if "is_causal" in name or "need_weights" in name]


def test_a_module_that_is_swapped_while_it_is_recorded() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3))
    told = pytest.warns(RetrogradWarning, match="a .*module .*was replaced")
    with told as warned, collect(net) as seen, rg.rewrite(net, {"1.0:output.grad": rg.rules.Zero()}):
        net(torch.ones(2, 3)).sum().backward()
        net[0], net[2] = net[2], net[0]  # both are recorded on, under the names that they had
        net[1] = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        net(torch.ones(2, 3)).sum().backward()
    rules, recording = (str(each.message) for each in warned)
    assert rules.startswith("At 1.0 ")
    assert recording.startswith("At 1 ")
    swapped = {each["site"] for each in seen.facts["not_recorded"] if "swapped" in each["reason"]}
    assert swapped == {f"{path}:output{grad}" for path in ("1", "1.0", "1.1") for grad in ("", ".grad")}
