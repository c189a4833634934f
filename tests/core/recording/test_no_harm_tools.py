"""What else people do with a model gives the same while it is recorded: tracing, transforms, modes, copies."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import retrograd as rg
from tests.scenarios import bits

X = torch.linspace(-1, 1, 12).view(3, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(4, 6)
        self.act = nn.Tanh()
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


def backward(model: nn.Module, x: Tensor = X) -> list[Tensor | None]:
    model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def loss(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(model, parameters, (x,)).square().mean()


def detached(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trace(model: nn.Module) -> list[str]:
    return [node.kind() for node in torch.jit.trace(model, X).inlined_graph.nodes()]


def script(model: nn.Module) -> Any:
    scripted = torch.jit.script(model)
    return scripted.code, scripted(X), len(scripted.first._forward_hooks), backward(model)


def symbolic_trace(model: nn.Module) -> str:
    return torch.fx.symbolic_trace(model).code


def export(model: nn.Module) -> str:
    return torch.export.export(model, (X,)).graph_module.code


def trace_operators(model: nn.Module) -> str:
    return make_fx(lambda x: model(x).square().sum())(X).code


def trace_gradients(model: nn.Module) -> str:
    def step(x: Tensor) -> Any:
        return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))

    return make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(X).code


def functional_gradient(model: nn.Module) -> Any:
    return grad(lambda parameters: loss(model, parameters, X))(detached(model))


def gradients_per_sample(model: nn.Module) -> Any:
    per_sample = grad(lambda parameters, x: loss(model, parameters, x[None]))
    return vmap(per_sample, in_dims=(None, 0))(detached(model), X)


def jacobian(model: nn.Module) -> Any:
    return jacrev(lambda x: model(x))(X), jvp(model, (X,), (torch.ones_like(X),))


def forward_mode(model: nn.Module) -> Any:
    with forward.dual_level():
        return forward.unpack_dual(model(forward.make_dual(X, torch.ones_like(X)))).tangent


def anomaly_detection(model: nn.Module) -> Any:
    with torch.autograd.detect_anomaly():
        return backward(model)


def saved_on_cpu(model: nn.Module) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return backward(model)


def saved_tensors_mutated(model: nn.Module) -> Any:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        return backward(model)


def one_thread(model: nn.Module) -> Any:
    with torch.autograd.set_multithreading_enabled(False):
        return backward(model)


def deterministic(model: nn.Module) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return backward(model)
    finally:
        torch.use_deterministic_algorithms(False)


def deep_copy(model: nn.Module) -> Any:
    return copy.deepcopy(model)(X)


def save_and_load(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)(X), list(model.state_dict())


def save_output(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model(X), file)
    file.seek(0)
    return torch.load(file)


def fake_tensors(model: nn.Module) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return tuple(model(torch.empty(3, 4)).shape)


def on_meta(model: nn.Module) -> Any:
    return tuple(model.to("meta")(X.to("meta")).shape)


def count_flops(model: nn.Module) -> Any:
    with FlopCounterMode(display=False) as counter:
        backward(model)
    return counter.get_total_flops()


def weight_norm(model: Any) -> Any:
    parametrizations.weight_norm(model.first)
    return backward(model)


def another_type(model: nn.Module) -> Any:
    return backward(model.double(), X.double())


def assigned_weights(model: nn.Module) -> Any:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
    return backward(model)


def replaced_module(model: Any) -> Any:
    model.act = nn.ReLU(inplace=True)
    return backward(model)


def frozen_meanwhile(model: Any) -> Any:
    model.first.requires_grad_(requires_grad=False)
    return [*backward(model), model.first.requires_grad_().weight.requires_grad, *backward(model)]


def hooks_cleared(model: Any) -> Any:
    model.first._forward_hooks.clear()
    return [*backward(model), len(model.first._forward_hooks)]


def called_by_forward(model: nn.Module) -> Any:
    out = model.forward(X)
    out.sum().backward()
    return out


def parameters_tied(model: Any) -> Any:
    model.last.bias = nn.Parameter(model.first.bias[:2].detach())
    return backward(model)


def gradient_of_input(model: nn.Module) -> Any:
    x = X.clone().requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
    return x.grad


def inference(model: nn.Module) -> Any:
    with torch.inference_mode():
        return model(X)


USES: list[Callable[[nn.Module], Any]] = [
    trace, script, symbolic_trace, export, trace_operators, trace_gradients, functional_gradient,
    gradients_per_sample, jacobian, forward_mode, anomaly_detection, saved_on_cpu, saved_tensors_mutated,
    one_thread, deterministic, deep_copy, save_and_load, save_output, fake_tensors, on_meta, count_flops,
    weight_norm, another_type, assigned_weights, replaced_module, frozen_meanwhile, hooks_cleared,
    called_by_forward, parameters_tied, gradient_of_input, inference,
]  # fmt: skip


@pytest.mark.parametrize("sites", [None, "*"], ids=["default", "everything"])
@pytest.mark.parametrize("use", USES)
def test_the_same_comes_out(use: Callable[[nn.Module], Any], sites: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its old and its experimental parts
        warnings.simplefilter("error", rg.RetrogradWarning)
        expected = use(Net())
        model = Net()
        with rg.record(model, sites=sites):
            seen = use(model)
    assert bits("", seen) == bits("", expected)


def test_a_hook_on_a_leaf_goes_with_its_step() -> None:
    model = Net()
    x = X.clone().requires_grad_()
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    with rg.record(model, sites="*"):
        for _ in range(3):
            model(x).sum().backward()
            update.step()
            model(x)
            assert len(x._backward_hooks or ()) <= 2
    assert not x._backward_hooks


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fast_path_of_transformers_is_off_in_evaluation(norm_first: bool) -> None:
    """Torch leaves it where it finds hooks; what comes out differs in the last bits, if at all."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(3, 10, 64), torch.arange(10)[None] >= torch.tensor([[10], [6], [3]])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        with rg.record(model):
            seen = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)
