"""Tests of what every policy for saved tensors must do, to inherit from."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Size, Tensor, nn
from torch.backends import cudnn

from retrograd.memory.policies.policy import Packed, Policy, Saved
from retrograd.memory.saved.keeping import keep_saved

LARGE = 20_000
"""Elements of the tensors that are packed: enough for the threshold of every policy in this package."""

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


class PolicyTests:
    """The contract of :class:`rg.saved.Policy <retrograd.memory.policies.policy.Policy>`, to inherit in a test file.

    Write ``make_policy``::

        class TestMyPolicy(PolicyTests):
            def make_policy(self) -> Policy:
                return MyPolicy()

    Any test runner that finds methods named ``test_…`` will do.

    Attributes:
        largest_error: how far the gradients of a policy that is not exact may be from those of plain autograd,
            relative, on small nets.
        device: where the tensors are.
    """

    largest_error: float = 0.1
    device: torch.device = torch.device("cpu")

    def make_policy(self) -> Policy:
        """A new policy that nothing uses yet."""
        raise NotImplementedError

    def test_gradients_are_those_of_plain_autograd(self) -> None:
        for name, make in NETS.items():
            expected = self._train(make, None)
            policy = self.make_policy()
            found = self._train(make, policy)
            if policy.is_exact:
                for number, (gradient, other) in enumerate(zip(found, expected, strict=True)):
                    assert torch.equal(gradient, other), f"{name}: gradient {number} is not bitwise the same"
            else:
                whole, other = (torch.cat([part.flatten() for part in parts]) for parts in (found, expected))
                error = float((whole - other).norm() / other.norm())
                assert error <= self.largest_error, f"{name}: the gradient is off by {error:.3g}"

    def test_values_of_every_dtype_come_back(self) -> None:
        with self._opened() as policy:
            for dtype in DTYPES:
                values = self._values(dtype)
                packed = policy.pack(_as_saved(values))
                back = values if packed is None else packed.restore()
                assert (back.shape, back.dtype, back.device) == (values.shape, dtype, values.device)
                assert back.is_contiguous()
                if policy.is_exact:
                    assert _bits(back) == _bits(values), f"{dtype} does not come back bit by bit"

    def test_special_numbers_come_back_or_stay_special(self) -> None:
        with self._opened() as policy:
            values = self._values(torch.float32)
            values[:6] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-42, 3e38])
            packed = policy.pack(_as_saved(values))
            back = values if packed is None else packed.restore()
            if policy.is_exact:
                assert _bits(back) == _bits(values)
            else:
                assert not back[:3].isfinite().any(), "Inf and NaN are hidden"

    def test_zeros_come_back_as_zeros(self) -> None:
        with self._opened() as policy:
            values = self._values(torch.float32).relu_()
            packed = policy.pack(_as_saved(values))
            back = values if packed is None else packed.restore()
            assert torch.equal(back == 0, values == 0), "the gradient of a ReLU asks which values are zero"

    def test_it_does_not_write_into_what_it_is_given(self) -> None:
        with self._opened() as policy:
            values = self._values(torch.float32)
            before = values.clone()
            packed = policy.pack(_as_saved(values))
            if packed is not None:
                packed.restore()
            assert torch.equal(values, before)

    def test_it_can_be_restored_twice_and_after_it_was_closed(self) -> None:
        policy = self.make_policy()
        policy.open()
        values = self._values(torch.float32)
        packed = policy.pack(_as_saved(values.clone()))
        policy.close()
        if packed is not None:
            first, second = packed.restore(), packed.restore()
            assert torch.equal(first, second)
            if policy.is_exact:
                assert torch.equal(first, values)

    def test_it_can_be_opened_again(self) -> None:
        policy = self.make_policy()
        for _ in range(2):
            policy.open()
            packed = policy.pack(_as_saved(self._values(torch.float32)))
            if packed is not None:
                packed.restore()
            policy.close()

    def test_resident_bytes_are_less_than_the_memory(self) -> None:
        with self._opened() as policy:
            values = self._values(torch.float32)
            packed = policy.pack(_as_saved(values))
            if packed is not None:
                assert 0 <= packed.resident_bytes < values.nbytes, "a policy that saves nothing should return None"

    def test_memory_is_freed_with_the_graph(self) -> None:
        policy = Counting(self.make_policy())
        is_collecting = gc.isenabled()
        gc.disable()  # a cycle would hold the memory too
        try:
            model = convolutions()[0].to(self.device)
            with keep_saved(model, policy):
                images = torch.randn(4, 3, 32, 32, device=self.device)
                model(images).sum().backward()
                model(images)  # dropped without a backward pass
                kept = model(images).square().sum()
                kept.backward(retain_graph=True)
                kept.backward()
            del kept
            assert not [packed for packed in policy.packed if packed() is not None]
        finally:
            if is_collecting:
                gc.enable()

    def test_errors_in_forward_and_backward_leave_nothing_behind(self) -> None:
        policy = Counting(self.make_policy())
        failing = _Failing()
        model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), failing).to(self.device)
        threads = threading.active_count()
        with keep_saved(model, policy):
            for where in ("forward", "backward"):
                failing.where = where
                try:
                    model(torch.randn(64, 64, device=self.device)).sum().backward()
                except ArithmeticError as error:
                    error.__traceback__ = None  # its frames hold the graph
                else:
                    raise AssertionError("the error is gone")
        assert threading.active_count() == threads, "threads are left"
        gc.collect()  # torch's own traceback may hold the graph in a cycle
        assert not [packed for packed in policy.packed if packed() is not None]

    def _train(self, make: Callable[[], tuple[nn.Module, Tensor]], policy: Policy | None) -> list[Tensor]:
        """Gradients of two steps. On a device, by algorithms that give the same bits twice."""
        is_on_device = torch.device(self.device).type == "cuda"
        with cudnn.flags(enabled=True, deterministic=True) if is_on_device else nullcontext():
            return self._train_twice(make, policy)

    def _train_twice(self, make: Callable[[], tuple[nn.Module, Tensor]], policy: Policy | None) -> list[Tensor]:
        torch.manual_seed(3)
        model, inputs = make()
        model, inputs = model.to(self.device), inputs.to(self.device)
        handle = None if policy is None else keep_saved(model, policy)
        gradients = []
        for _ in range(2):
            model.zero_grad()
            model(inputs).square().mean().backward()
            gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if handle is not None:
            handle.remove()
        return gradients

    def _values(self, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        values = torch.randn(LARGE, generator=generator) * 30
        return (values > 0 if dtype is torch.bool else values.abs() if dtype is torch.uint8 else values).to(
            self.device, dtype
        )

    @contextmanager
    def _opened(self) -> Iterator[Policy]:
        policy = self.make_policy()
        policy.open()
        try:
            yield policy
        finally:
            policy.close()


class Counting(Policy):
    """A policy, and weak references to what it packed."""

    def __init__(self, policy: Policy) -> None:
        self.is_exact = policy.is_exact
        self.min_bytes = policy.min_bytes
        self.open = policy.open  # type: ignore[method-assign]
        self.close = policy.close  # type: ignore[method-assign]
        self.packed: list[weakref.ref[Packed]] = []
        self._policy = policy

    def pack(self, saved: Saved) -> Packed | None:
        """Hand a tensor to the policy."""
        packed = self._policy.pack(saved)
        if packed is not None:
            self.packed.append(weakref.ref(packed))
        return packed


def _as_saved(values: Tensor) -> Saved:
    return Saved(values, Size((values.numel(),)), "layer", 0)


def _bits(values: Tensor) -> bytes:
    return values.cpu().view(torch.uint8).numpy().tobytes()


# ---- nets -----------------------------------------------------------------------------------------------------


def convolutions() -> tuple[nn.Module, Tensor]:
    """Convolutions in channels_last, batch norm, ReLU in place, max-pool."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8192, 10),
    )  # fmt: skip
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)


class _Attention(nn.Module):
    """Fused projections, whose parts share a storage; a mask that is expanded; dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / 6
        mask = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril().expand_as(scores)
        mixed = F.dropout(scores.masked_fill(~mask, -1e9).softmax(-1), 0.1) @ v
        return torch.add(x, self.out(F.gelu(mixed)))


def attention() -> tuple[nn.Module, Tensor]:
    """Two blocks of attention."""
    return nn.Sequential(_Attention(), _Attention()), torch.randn(4, 96, 32)


def recurrent() -> tuple[nn.Module, Tensor]:
    """An LSTM, whose gates share a storage and not a version counter."""
    return _FirstOutput(nn.LSTM(32, 64, batch_first=True)), torch.randn(32, 12, 32)


class _FirstOutput(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        outputs: tuple[Tensor, ...] = self.module(x)
        return outputs[0]


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        raise ArithmeticError


class _Failing(nn.Module):
    where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise ArithmeticError
        return torch.as_tensor(_Raises.apply(x))  # type: ignore[no-untyped-call]


NETS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "convolutions": convolutions,
    "attention": attention,
    "recurrent": recurrent,
}
