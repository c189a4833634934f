"""``rg.watch`` inside compiled code: what eager code records, in as many graphs as without a recording."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from retrograd.core.errors import GraphBreakError, RetrogradWarning
from retrograd.core.hooks import watched
from tests.compiling import count_compiled
from tests.rewriting.models import add_one, halve
from tests.scenarios import bits

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = rg.watch("hidden", self.fc(x))
        hidden = hidden * 2
        return x + hidden.relu_()


class Net(nn.Module):
    """Watches a tensor twice, in a checkpoint too; a nest; one without a gradient; its own result."""

    def __init__(self, *, saved: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.saved = saved

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.saved else block(x)
        state = rg.watch("state", {"x": x.sin(), "pair": (x.cos(), None), "n": x.argmax()})
        return rg.watch("result", state["x"] + state["pair"][0])


def run(
    compile_: Callable[[nn.Module], Any], *, record: bool = True, saved: bool = False, schedule: int = 1
) -> tuple[Any, dict[str, Any], Any]:
    """Train and evaluate; what came out of it, what was compiled, and the rows of what was watched."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(5)
    model = Net(saved=saved)
    call = compile_(model)
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with rg.record(model, schedule=schedule) if record else nullcontext() as recording:
        for _ in range(3):
            loss = call(torch.randn(4, 6)).square().mean()
            loss.backward()
            update.step()
            update.zero_grad()
            seen.append(loss)
        with torch.no_grad():
            seen.append(call(torch.ones(4, 6)))
    return bits("", [*seen, *model.parameters()]), count_compiled(), recording and watched_rows(recording.history)


def watched_rows(history: Any) -> dict[str, list[Any]]:
    statistics = ("steps", "count", "mean", "rms", "min", "max", "zeros")
    return {
        name: [getattr(history[name], each).tolist() for each in statistics]
        for name in history.sites
        if name.startswith("watch/")
    }


def whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def blocks(model: nn.Module) -> Any:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager", fullgraph=True)
    return model


@pytest.mark.parametrize(
    ("way", "how"),
    [(whole, {}), (whole, {"saved": True}), (blocks, {"saved": True, "schedule": 2})],
    ids=["whole", "checkpoints inside", "checkpoints around"],
)
def test_what_eager_code_records_in_as_many_graphs(way: Any, how: dict[str, Any]) -> None:
    _, _, expected = run(lambda model: model, **how)
    bare, compiled_bare, _ = run(way, record=False, **how)
    seen, compiled, found = run(way, **how)
    assert len(expected) == 11
    assert found == expected
    assert seen == bare
    assert compiled == compiled_bare


def test_without_a_model_and_in_a_function_that_is_compiled_with_its_backward() -> None:
    def train(compile_: Callable[..., Any]) -> dict[str, list[Any]]:
        torch.manual_seed(1)
        w = torch.zeros(3, requires_grad=True)
        update = torch.optim.SGD([w], lr=0.1)

        @compile_
        def find_loss(x: Tensor) -> Tensor:
            return (rg.watch("y", x @ rg.watch("w", w)) - 1).square().mean()

        with rg.record() as recording:
            for _ in range(3):
                find_loss(torch.randn(8, 3)).backward()
                update.step()
                update.zero_grad()
        return watched_rows(recording.history)

    expected = train(lambda function: function)
    assert expected["watch/y.grad"][0] == [0, 1, 2]
    assert train(torch.compile(backend="aot_eager", fullgraph=True)) == expected


def test_nothing_is_compiled_anew_when_the_recording_changes() -> None:
    model = Net()
    call = whole(model)

    def step() -> None:
        call(torch.ones(4, 6)).sum().backward()

    with rg.record(model):
        step()
    first = count_compiled()
    step()
    with rg.record(model, sites="watch/hidden*", schedule=2) as second, rg.record(model, sites="watch/result"):
        step()
    assert set(second.history.sites) == {f"watch/hidden#{call}{end}" for call in (1, 2) for end in ("", ".grad")}
    step()
    assert count_compiled() == first


def test_code_that_ran_before_is_compiled_once_more_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was put into its graph: the line costs nothing where nobody has listened so far."""
    monkeypatch.setattr(watched, "_tap", watched._WatchedTap())
    w = torch.ones(3, requires_grad=True)
    call = torch.compile(lambda x: rg.watch("y", x * w).sum(), backend="aot_eager", fullgraph=True)
    call(torch.ones(3)).backward()
    assert counters["stats"]["calls_captured"] == 2
    for _ in range(2):
        with rg.record() as recording:
            call(torch.ones(3)).backward()
        assert len(recording.history["watch/y.grad"].rms) == 1
    assert counters["stats"]["unique_graphs"] == 2


def test_inside_a_transform_nothing_is_recorded_and_nothing_fails() -> None:
    net = nn.Linear(3, 3)

    def watch(row: Tensor) -> Tensor:
        return rg.watch("row", net(row))

    x = torch.ones(2, 3)
    with rg.record(net) as recording:
        found = torch.compile(torch.func.vmap(watch), backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, net(x))
    assert not [site for site in recording.history.sites if ":output" in site or "watch/" in site]


def test_a_name_that_cannot_be_one() -> None:
    net = nn.Linear(3, 3)
    call = torch.compile(lambda x: rg.watch("a:b", net(x)), backend="aot_eager", fullgraph=True)
    with rg.record(net), pytest.raises(RuntimeError, match="'a:b' is not a valid name of a watched tensor"):
        call(torch.ones(2, 3))


def test_rules_act_between_two_graphs_and_this_is_told() -> None:
    net = Net()
    call = torch.compile(net, backend="aot_eager")
    x = torch.randn(4, 6)

    def train(called: Any) -> list[Tensor]:
        net.zero_grad()
        out = called(x)
        out.sum().backward()
        return [out.detach(), *(parameter.grad.clone() for parameter in net.parameters())]  # type: ignore[union-attr]

    with rg.rewrite(net, {"watch/state:x": add_one, "watch/state:x.grad": halve}), rg.record(net) as recording:
        expected = train(net)
        with pytest.warns(RetrogradWarning, match="breaks where rules act at watch/state:"):
            found = train(call)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(recording.history["watch/hidden#2.grad"].rms) == 2
    plain = train(net)
    torch.testing.assert_close(train(call), plain, rtol=0, atol=0)
    with rg.rewrite(net, {"watch/result": add_one}), pytest.raises(GraphBreakError, match="watch/result"):
        whole(net)(x)
