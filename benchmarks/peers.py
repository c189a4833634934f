"""Other libraries that read activations, as far as they are installed.

A peer is imported when its turn comes, since some replace functions of torch as soon as they are imported.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from torch import nn

from contenders import Attached, Contender, Group
from nets import Net


def leaves_in_call_order(net: Net) -> list[str]:
    """Paths of the modules without children, as a forward calls them."""
    paths: list[str] = []
    handles = [
        module.register_forward_hook(lambda module, args, output, path=path: paths.append(path))
        for path, module in net.model.named_modules()
        if not any(module.children())
    ]
    net.model(net.inputs)
    for handle in handles:
        handle.remove()
    return paths


@contextmanager
def nnsight_cache(net: Net) -> Iterator[Attached]:
    """All outputs, by ``tracer.cache``."""
    from nnsight import NNsight

    wrapped = NNsight(copy.deepcopy(net.model))

    def step() -> object:
        wrapped.zero_grad()
        with wrapped.trace(net.inputs) as tracer:
            cache = tracer.cache()
            loss = net.loss(wrapped.output).save()
        loss.backward()
        return cache

    yield Attached(step)


@contextmanager
def nnsight_gradients(net: Net) -> Iterator[Attached]:
    """Outputs of the leaf modules and their gradients."""
    import nnsight

    wrapped = nnsight.NNsight(copy.deepcopy(net.model))
    places = [wrapped.get(path) for path in leaves_in_call_order(net)]

    def step() -> object:
        wrapped.zero_grad()
        with wrapped.trace(net.inputs):
            outputs = nnsight.save([place.output for place in places])
            loss = net.loss(wrapped.output)
            with loss.backward():
                nnsight.save([output.grad for output in reversed(outputs)])
        return outputs

    yield Attached(step)


@contextmanager
def captum_layers(net: Net) -> Iterator[Attached]:
    """A step of ours, and captum's own pass for outputs of the leaf modules and their gradients."""
    from captum._utils.gradient import compute_layer_gradients_and_eval

    modules = [net.model.get_submodule(path) for path in leaves_in_call_order(net)]

    def step() -> object:
        net.step()
        return compute_layer_gradients_and_eval(lambda x: net.loss(net.model(x))[None], modules, net.inputs)

    yield Attached(step)


@contextmanager
def torchlens_history(net: Net) -> Iterator[Attached]:
    """Statistics of outputs over steps; it has none of their gradients."""
    from torchlens.observability import HistoryCollector

    steps = itertools.count()
    collector = HistoryCollector(net.model)
    collector.discover(net.inputs)
    collector.attach()

    def step() -> None:
        with collector.step(next(steps)):
            net.step()

    yield Attached(step)
    collector.detach()


@contextmanager
def torchlens_trace(net: Net) -> Iterator[Attached]:
    """Every operation and its gradient."""
    import torchlens
    from torchlens.options import CaptureOptions

    model: nn.Module = copy.deepcopy(net.model)

    def step() -> object:
        model.zero_grad()
        trace = torchlens.trace(model, net.inputs, capture=CaptureOptions(save_grads=True))
        trace.log_backward(net.loss(trace[trace.output_layers[0]].out))
        return trace

    yield Attached(step)


PEERS: dict[str, dict[str, Contender]] = {
    "captum": {"captum: outputs and gradients": captum_layers},
    "nnsight": {"nnsight: outputs": nnsight_cache, "nnsight: outputs and gradients": nnsight_gradients},
    "torchlens": {
        "torchlens: statistics of outputs": torchlens_history,
        "torchlens: outputs and gradients": torchlens_trace,
    },
}
"""What is measured of each module that is installed."""


def peer_groups() -> list[Group]:
    """A group for each peer, since nnsight and torchlens leave torch changed and the bare step with it."""
    return [Group(contenders) for module, contenders in PEERS.items() if find_spec(module)]
