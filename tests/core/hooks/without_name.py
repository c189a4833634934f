"""A process that takes a private name of torch's away before retrograd is loaded, uses it, and prints what came of it.

For each use: its value, or the error that it has raised. ``python without_name.py NAME``, a name as
``private_names.py`` has it; without one, nothing is taken away.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional as F

from retrograd.core.hooks.private_names import _find, is_there


class Gone:
    """An attribute that raises as if it were none."""

    def __get__(self, thing: object, owner: object) -> NoReturn:
        raise AttributeError("taken away")


def take_away(name: str) -> None:
    holder, _, last = name.replace(":", ".").rpartition(".")
    if isinstance(sys.modules.get(f"{holder}.{last}"), type(sys)):
        sys.modules[f"{holder}.{last}"] = None  # type: ignore[assignment]  # so Python writes that there is none
    found = _find(holder)
    if isinstance(found, type):  # which may have it from another one
        setattr(found, last, Gone())
    else:
        delattr(found, last)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(F.relu(self.norm(self.conv(x))).flatten(1))
        return out


X, Y = torch.linspace(-1, 1, 64).reshape(4, 1, 4, 4), torch.arange(4)


def load() -> str:
    return " ".join(str(getattr(rg, name) is not None) for name in rg.__all__)


def record() -> Any:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    with rg.record(net, sites=["*", "*/*"]) as recording:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(net(X), Y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            net.eval()
            with torch.no_grad():
                F.cross_entropy(net(X), Y)
            net.train()
    history = recording.history
    scalars = {name: history.scalars[name].values.tolist() for name in ("loss", "eval_loss", "grad_norm")}
    return {str(site): history[site].rms.tolist() for site in history.sites}, scalars


def checkpoint() -> Any:
    net = Net()
    with rg.record(net) as recording:
        for reentrant in (False, True):
            x = X.clone().requires_grad_()
            torch.utils.checkpoint.checkpoint(net, x, use_reentrant=reentrant).square().mean().backward()
    return {str(site): recording.history[site].rms.tolist() for site in recording.history.sites}


def rewrite() -> Any:
    net = Net()
    with rg.rewrite(net, {"head:output.grad": rg.rules.Scale(0.5), "conv:weight.grad": rg.rules.ClipNorm(0.01)}):
        F.cross_entropy(net(X), Y).backward()
    return [float(each.grad.norm()) for each in net.parameters() if each.grad is not None]


def split_samples() -> Any:
    net = Net()
    with rg.record(net, tensors=["*:inputs", "*:outputs.grad"]) as recording:
        F.cross_entropy(net(X), Y).backward()
    return {str(name): float(each.norm()) for name, each in rg.per_sample_gradients(recording).items()}


def save() -> Any:
    net = Net()
    with rg.keep_saved(net, rg.saved.Recompute()), rg.record(net):
        F.cross_entropy(net(X), Y).backward()
    with rg.take_inventory(net) as inventory:
        F.cross_entropy(net(X), Y).backward()
    return float(net.conv.weight.grad.norm()), inventory.resident  # type: ignore[union-attr]


def follow() -> Any:
    net = Net()
    loss = F.cross_entropy(net(X), Y)
    names = [node.name for node in rg.walk(loss)]
    rg.run_from(loss)
    with rg.trace() as trace:
        loss.backward()
    return names, [event.name for event in trace.events]


def examine() -> Any:
    net, loose = Net(), nn.Linear(2, 2)
    loss = F.cross_entropy(net(X), Y)
    reasons = str(rg.explain_gradients(nn.ModuleList([net, loose]), loss))
    return (
        reasons,
        str(rg.find_kinks(net, X)),
        str(rg.check_batch(net, X)),
        str(rg.check_adjoint(net.head, torch.ones(1, 12))).count("  ok"),  # by which derivative depends on torch
    )


def script() -> Any:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with rg.record(net):
        return float(torch.jit.script(net)(torch.zeros(1, 3)).numel())


USES: tuple[Callable[[], Any], ...] = (load, record, checkpoint, rewrite, split_samples, save, follow, examine, script)

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    told: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said, contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("always")
        if name:
            take_away(name)
        import retrograd as rg

        for use in USES:
            try:
                told[use.__name__] = use()
            except Exception as error:
                told[use.__name__] = f"raised {type(error).__name__}: {error}"
        told["there"] = not name or is_there(name)
    told["said"] = [str(each.message) for each in said if "retrograd" in str(each.message)]
    print(json.dumps(told))
