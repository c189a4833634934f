"""A model may be copied and saved while it is recorded; the copy is a plain model."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import retrograd as rg
from tests.core.recording.collector import collect

SITES = ["*:output*", "*:input*", "*:weight*"]


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def test_a_deep_copy_is_not_recorded() -> None:
    net = make_net()
    with collect(net, sites=SITES) as seen:
        net(torch.ones(2, 3)).sum().backward()
        twin = copy.deepcopy(net)
        rows = len(seen.rows)
        twin(torch.ones(2, 3)).sum().backward()
        assert len(seen.rows) == rows
        net(torch.ones(2, 3)).sum().backward()
    assert [row.micro for row in seen.all("0:output")] == [0, 1]
    assert [row.calls for row in seen.all("0:weight.grad")] == [1, 1]
    assert torch.equal(twin[0].weight.grad, net[0].weight.grad / 2)  # type: ignore[arg-type, operator]


def test_a_copy_can_be_recorded_by_itself() -> None:
    net = make_net()
    with collect(net):
        twin = copy.deepcopy(net)
    with collect(twin) as seen:
        twin(torch.ones(2, 3)).sum().backward()
    assert seen.one("0:output.grad").calls == 1


def test_a_saved_model_loads_where_there_is_no_retrograd(tmp_path: Path) -> None:
    net = make_net()
    with collect(net, sites=SITES):
        net(torch.ones(2, 3)).sum().backward()
        torch.save(net, tmp_path / "net.pt")
        torch.save(net.state_dict(), tmp_path / "weights.pt")
        (tmp_path / "net.pickle").write_bytes(pickle.dumps(net))
    script = f"""
import pickle, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "retrograd":
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import torch
net = torch.load({str(tmp_path / "net.pt")!r}, weights_only=False)
torch.load({str(tmp_path / "weights.pt")!r}, weights_only=True)
other = pickle.load(open({str(tmp_path / "net.pickle")!r}, "rb"))
for each in (net, other):
    each(torch.ones(2, 3)).sum().backward()
assert "retrograd" not in sys.modules
print("loaded", len(net[0]._forward_hooks))
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert result.stdout.startswith("loaded"), result.stderr


def test_watched_tensors_and_losses_can_be_saved(tmp_path: Path) -> None:
    net = make_net()
    with collect(net):
        x = torch.ones(2, 3, requires_grad=True)
        out = net(x)
        torch.save({"x": x, "out": out}, tmp_path / "batch.pt")
        out.sum().backward()
    assert set(torch.load(tmp_path / "batch.pt", weights_only=True)) == {"x", "out"}


# ---- byte for byte --------------------------------------------------------------------------------------------


class Hooked(nn.Module):
    """A model with hooks of the program's own, of every kind that can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)
        self.handles = [self.first.register_forward_hook(see_output), self.register_forward_pre_hook(see_call)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


def see_output(*_: Any) -> None: ...


def see_call(*_: Any) -> None: ...


class OwnState(Hooked):
    """Says by itself what is pickled of it, as DDP does."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "more": 1}


Objects = dict[str, Any]
OPTIMIZED = ("optimizer", "scheduler")


def build(kind: type[Hooked]) -> Objects:
    """A model and what trains it; hooks are numbered as if it were the first of the process."""
    torch.manual_seed(0)
    RemovableHandle.next_id = 1000
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "leaf": torch.ones(2, 3, requires_grad=True),
    }


def train(things: Objects) -> None:
    """A step, and then hooks that come after those of whoever watches."""
    model = things["model"]
    model(things["leaf"]).sum().backward()
    things["optimizer"].step()
    things["scheduler"].step()
    model.handles.append(model.norm.register_forward_hook(see_output, with_kwargs=True, always_call=True))
    model.handles.append(model.last.register_forward_pre_hook(see_call, prepend=True, with_kwargs=True))
    model.handles.append(model.register_full_backward_hook(see_output))
    things.update(parameter=model.last.weight, state=model.state_dict(), states=things["optimizer"].state_dict())


def save(thing: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file, **how)
    return file.getvalue()


class _Values:
    """Writes the memory of tensors as their values: by themselves they write where it lies."""

    def persistent_id(self, thing: object) -> object:
        if isinstance(thing, torch.storage.TypedStorage):
            return str(thing.dtype), bytes(thing._untyped_storage)
        return None


class CPickler(_Values, pickle.Pickler): ...


class PythonPickler(_Values, pickle._Pickler): ...  # type: ignore[name-defined, misc]


class CloudPickler(_Values, cloudpickle.Pickler): ...  # type: ignore[misc]


def dump(thing: Any, kind: Any = CPickler, protocol: int | None = None) -> bytes:
    file = io.BytesIO()
    kind(file, protocol=protocol).dump(thing)
    return file.getvalue()


WRITERS: dict[str, Callable[[Any], bytes]] = {
    **{f"pickle {number}": partial(dump, protocol=number) for number in range(pickle.HIGHEST_PROTOCOL + 1)},
    "pickle in Python": partial(dump, kind=PythonPickler),
    "cloudpickle": partial(dump, kind=CloudPickler),
    "torch.save": save,
    "deepcopy": lambda thing: dump(copy.deepcopy(thing)),
    "deepcopy of all": lambda thing: dump(copy.deepcopy([thing, thing])),
    "copy": lambda thing: dump(copy.copy(thing)),
}


def written(things: Objects) -> dict[str, bytes]:
    """What each way of writing makes of each thing; warnings would be errors."""
    return {f"{name} of {way}": write(thing) for name, thing in things.items() for way, write in WRITERS.items()}


@contextmanager
def nested(*each: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in each:
            stack.enter_context(one)
        yield


REWRITTEN = ("*:output", "*:output.grad", "*:input.x", "*:input.x.grad", "first:weight", "*:weight.grad", "*:bias.grad")

TOOLS: dict[str, Callable[[Objects], AbstractContextManager[Any]]] = {
    "record": lambda things: rg.record(things["model"], sites="*", tensors="*"),
    "record twice": lambda things: nested(rg.record(things["model"]), rg.record(things["model"], sites="*:input*")),
    "rewrite": lambda things: rg.rewrite(things["model"], dict.fromkeys(REWRITTEN, rg.rules.Scale(1.0))),
    "rewrite of an optimizer": lambda things: rg.rewrite(things["optimizer"], rg.rules.ClipNorm(1e9)),
    "passes of an optimizer": lambda things: rg.rewrite(things["optimizer"], rg.rules.PCGrad()),
    "keep_saved": lambda things: rg.keep_saved(things["model"], rg.saved.Lossless()),
    "recompute": lambda things: rg.keep_saved(things["model"], {"first": rg.saved.Recompute()}),
    "budget": lambda things: rg.keep_saved(things["model"], budget="1GB"),
    "keep_saved in the process": lambda things: rg.keep_saved(None, rg.saved.AsIs()),
    "origins": lambda things: rg.record_origins(things["model"]),
    "trace": lambda things: rg.trace(things["model"], norms=True),
    "inventory": lambda things: rg.take_inventory(things["model"]),
    "extract": lambda things: done(rg.extract(things["model"].eval(), torch.ones(2, 3), "first:output"), things),
    "check_adjoint": lambda things: done(rg.check_adjoint(things["model"].eval(), torch.ones(2, 3)), things),
}


def done(result: object, things: Objects) -> AbstractContextManager[None]:
    """It has run before training."""
    things["model"].train()
    return nullcontext()


@pytest.mark.parametrize("kind", [Hooked, OwnState])
@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_written_of_a_watched_model_is_what_it_is_without_us(tool: str, kind: type[Hooked]) -> None:
    bare = build(kind)
    train(bare)
    expected = written(bare)
    after = build(kind)
    with TOOLS[tool](after):
        train(after)
        found = written(after)
    assert [name for name in expected if found[name] != expected[name]] == []
    again = written(after)
    assert [name for name in expected if again[name] != expected[name]] == []
