"""Functions on a torch that lacks one of its private names, which is the only argument: what they do is compared.

Torch itself keeps the name: it is taken away from the file that asks for it, while that is loaded.
"""

from __future__ import annotations

import importlib
import math
import sys
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor


class Without:
    """A thing of torch's, without one of its names."""

    def __init__(self, thing: Any, name: str) -> None:
        self._thing, self._name = thing, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._thing, name)


def load_without(path: str) -> None:
    """Load the file that asks for the names, without the one that ends this path."""
    owner, _, name = path.rpartition(".")
    above, _, last = owner.rpartition(".")
    holder, thing = attrgetter(above)(torch) if above else torch, attrgetter(owner)(torch)
    importlib.import_module("retrograd.core.hooks.engine")
    setattr(holder, last, Without(thing, name))
    importlib.import_module("retrograd.core.hooks.functions")
    setattr(holder, last, thing)


def compare() -> None:
    """Functions whose code is written out, and others, against torch's own."""
    import retrograd as rg
    from tests.tools.functions.linear import MyLinear, PlainLinear, tensors

    class Apart(rg.Function):
        generate_vmap_rule = True

        def forward(self, x: Tensor) -> tuple[Tensor, rg.Auxiliary]:
            return x.square(), rg.Auxiliary(x.argmax())

        def setup_context(self, ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
            assert ctx.needs_grad == {"x": True}
            return {"x": 2 * grad_output * ctx.saved_tensors[0]}

    x, weight, bias = tensors()
    given = x, weight.detach(), bias
    ours, theirs = MyLinear()(*given), PlainLinear.apply(*given)
    assert torch.equal(ours, theirs)
    incoming = torch.randn_like(ours)
    gradients = [torch.autograd.grad(output, (x, bias), incoming) for output in (ours, theirs)]
    assert all(map(torch.equal, *gradients))
    assert torch.autograd.gradcheck(MyLinear(), (x, weight, bias))
    assert torch.autograd.gradgradcheck(MyLinear(), (x, weight, bias))

    square, largest = Apart()(x[0])
    assert torch.equal(torch.autograd.grad(square.sum(), x)[0][0], 2 * x[0])
    assert largest == x[0].argmax()
    each = torch.func.vmap(torch.func.grad(lambda row: Apart()(row)[0].sum()))(x.detach())
    assert torch.equal(each, 2 * x)

    left: list[Tensor] = []
    torch.func.grad(lambda inner: (left.append(inner), inner.sum())[1])(x.detach())
    assert torch.equal(MyLinear()(left[0], weight, bias), theirs)

    linear = MyLinear()
    linear.weight = torch.nn.Parameter(weight.detach())
    with rg.record(torch.nn.Sequential(linear)) as recording:
        linear(x, bias=bias).backward(incoming)
    assert math.isclose(recording.history["0:output"].rms[-1], theirs.square().mean().sqrt().item())


if __name__ == "__main__":
    load_without(sys.argv[1])
    compare()
