"""A tap on all operations of a thread, which changes none of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.core.hooks.dispatch import OperationTap, hide_taps, without_graph

LAZY_KEYS = [getattr(torch._C.DispatchKey, name) for name in ("Conjugate", "Negative", "ZeroTensor", "ADInplaceOrView")]


def excluded() -> list[bool]:
    return [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in LAZY_KEYS]


@contextmanager
def tapped() -> Iterator[list[str]]:
    seen: list[str] = []

    def carry_out(function: Any, args: Any, kwargs: Any) -> Any:
        seen.append(str(function))
        return function(*args, **kwargs)

    tap = OperationTap(carry_out)
    tap.put_on()
    try:
        yield seen
    finally:
        tap.take_off()


def conjugates() -> list[Tensor]:
    x = torch.complex(torch.arange(6.0), torch.ones(6)).reshape(2, 3)
    y = x.conj()
    z = y.mH.imag
    kept = y.clone()
    y.imag.add_(1)
    return [
        y,
        z,
        kept,
        y @ x.T,
        y + 1,
        z.clone(),
        torch.cat([y, y]),
        torch.linalg.svdvals(y),
        x.real.neg(),
        y.to(torch.cdouble),
    ]


def zeros() -> list[Tensor]:
    zero = torch._efficientzerotensor([3])
    return [zero + torch.ones(3), zero * torch.ones(3), zero.clone()]


def writes() -> list[Tensor]:
    x = [torch.ones(3), torch.ones(2, 2)]
    torch._foreach_add_(x, 1.0)
    torch._foreach_mul_(x, [2.0, 3.0])
    x[0][:2].mul_(2)
    torch.add(x[1], 1, out=x[1])
    return [*x, *(torch.tensor(float(each._version)) for each in x)]


def training() -> list[Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 4, 3), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        model(torch.randn(2, 2, 8)).square().sum().backward()
        optimizer.step()
    values = [*model.state_dict().values(), *(parameter.grad for parameter in model.parameters())]
    return [*values, *(torch.tensor(value._version) for value in values if value is not None)]  # type: ignore[list-item]


@pytest.mark.parametrize("compute", [conjugates, zeros, writes, training])
def test_results_and_counted_writes_are_the_same(compute: Callable[[], list[Tensor]]) -> None:
    expected = compute()
    with tapped() as seen:
        found = compute()
    assert seen
    assert all(torch.equal(a, b) and a.is_conj() == b.is_conj() for a, b in zip(found, expected, strict=True))


def test_keys_of_the_dispatcher_are_afterwards_what_they_were() -> None:
    before = excluded()
    with tapped():
        torch.ones(2).add_(1)
        with pytest.raises(RuntimeError):
            torch.ones(2) + torch.ones(3)
        assert excluded() == before
    assert excluded() == before


def test_a_call_from_python_leaves_them_too() -> None:
    """Torch calls modes so for operations that it dispatches itself."""
    conjugate = torch.ones(2, dtype=torch.cfloat).mul(1j).conj()
    tap = OperationTap(lambda function, args, kwargs: function(*args, **kwargs))
    before = excluded()
    result = tap.__torch_dispatch__(torch.ops.aten.clone.default, (), (conjugate,))
    assert excluded() == before
    assert torch.equal(result, conjugate)


def test_what_is_put_on_elsewhere_stays() -> None:
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    tap = OperationTap(lambda function, args, kwargs: function(*args, **kwargs))
    tap.put_on()
    with Other() as other:
        assert hide_taps() == []  # it is not on top
        tap.take_off()
        assert torch._C._get_dispatch_stack_at(0) is other
        tap.take_off()  # it is not there
        assert torch._C._len_torch_dispatch_stack() == 1
        tap.put_on()
        above = OperationTap(lambda function, args, kwargs: function(*args, **kwargs))
        above.put_on()
        assert hide_taps() == [tap, above]
        assert torch._C._len_torch_dispatch_stack() == 1
    assert torch._C._len_torch_dispatch_stack() == 0


def test_other_threads_are_not_listened_to() -> None:
    with tapped() as seen:
        thread = threading.Thread(target=lambda: torch.ones(2).exp())
        thread.start()
        thread.join()
        assert not seen
        torch.ones(2).exp()
    assert seen == ["aten.ones.default", "aten.exp.default"]


def test_modes_beneath_do_not_see_what_is_held() -> None:
    x = torch.nn.Parameter(torch.ones(3))
    with tapped() as seen:
        held = without_graph(x)
    assert not seen
    assert held.data_ptr() == x.data_ptr()
    assert not held.requires_grad
