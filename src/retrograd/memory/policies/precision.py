"""Keep fewer bits of saved tensors, and measure what that costs."""

from __future__ import annotations

import threading
from typing import ClassVar

import torch
from torch import Tensor

from retrograd.core.norms import norm
from retrograd.memory.policies.policy import Packed, Policy, Saved

MEASURED_EVERY = 16
"""One storage range in so many is brought back at once and compared."""


class Coarse(Packed):
    """Values of fewer bits."""

    __slots__ = ("_policy", "_shape", "parts")

    def __init__(self, parts: tuple[Tensor, ...], like: Tensor, policy: LossyPolicy) -> None:
        super().__init__(sum(part.nbytes for part in parts))
        self.parts = parts
        self._shape = like.dtype, like.numel()
        self._policy = policy

    def restore(self) -> Tensor:
        """The values, rounded."""
        return self._policy.decode(self.parts, *self._shape)


class LossyPolicy(Policy):
    """A policy that rounds. Subclasses write ``encode`` and ``decode``.

    Attributes:
        dtypes: what it rounds; the rest stays.
    """

    is_exact = False
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset()

    def __init__(self, *, min_bytes: int = Policy.min_bytes) -> None:
        self.min_bytes = min_bytes
        self._count = 0
        self._squares: dict[torch.device, Tensor] = {}
        self._adding = threading.Lock()

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Encode a one-dimensional tensor: what is kept of it."""
        raise NotImplementedError

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype, numel: int) -> Tensor:
        """The values again, with their dtype and number."""
        raise NotImplementedError

    def pack(self, saved: Saved) -> Packed | None:
        """Round what is of one of the dtypes."""
        values = saved.values
        if values.dtype not in self.dtypes:
            return None
        coarse = Coarse(self.encode(values), values, self)
        self._count += 1
        if self._count % MEASURED_EVERY == 1:
            self._measure(values, coarse)
        return coarse

    @property
    def error(self) -> float:
        """Relative error of what was rounded so far: √(Σ (x − x̂)² / Σ x²), over a sixteenth of it; NaN before.

        Reading it waits for the device; training does not.
        """
        with self._adding:
            parts = [part.tolist() for part in self._squares.values()]
        squares, of = (sum(part[index] for part in parts) for index in (0, 1))
        if not parts or not of:
            return float("nan") if not parts or squares else 0.0
        return float((squares / of) ** 0.5)

    def _measure(self, values: Tensor, coarse: Coarse) -> None:
        norms = [norm(part) for part in (values - coarse.restore(), values)]
        squares = torch.stack(norms).double().square()
        with self._adding:
            before = self._squares.get(values.device)
            self._squares[values.device] = squares if before is None else before + squares


class Bfloat16(LossyPolicy):
    """float32 and float64 wait as bfloat16: half the memory and less, with a relative error of up to 2⁻⁸ each value.

    Zeros, signs, Inf and NaN come back; what bfloat16 has no room for becomes Inf. ``error`` is what was measured.
    """

    dtypes = frozenset({torch.float32, torch.float64})

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Round to the nearest."""
        return (values.to(torch.bfloat16),)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype, numel: int) -> Tensor:
        """Widen to the dtype before."""
        return parts[0].to(dtype)


class EightBit(LossyPolicy):
    """Floating-point numbers wait as 8 bits each, with one scale for each group: x ≈ s·q, s = max|x| / 127.

    Zeros come back as zeros, and nothing else does: what would be rounded to zero becomes the smallest step with its
    sign, because the gradient of a ReLU asks just that. A group with Inf or NaN comes back as Inf and NaN. ``error`` is
    what was measured.

    The idea of scales for groups is that of ActNN (Chen et al., 2021).

    Args:
        group: so many values share a scale of 4 bytes.
        min_bytes: smaller storage ranges stay.
    """

    dtypes = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})

    def __init__(self, group: int = 256, *, min_bytes: int = Policy.min_bytes) -> None:
        super().__init__(min_bytes=min_bytes)
        self.group = group

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Quotients as int8 with one row for each group, and the scales."""
        rest = -values.numel() % self.group
        rows = torch.nn.functional.pad(values, (0, rest)).view(-1, self.group).float()
        low, high = torch.aminmax(rows, dim=1, keepdim=True)
        scales = torch.maximum(high, -low).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
        quotients = rows / scales
        least = quotients.sign()
        quotients = torch.where(quotients.abs() < 1, least, quotients.round_())
        return quotients.nan_to_num_(1.0).to(torch.int8), scales

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype, numel: int) -> Tensor:
        """Quotients times scales."""
        quotients, scales = parts
        return (quotients.float() * scales).view(-1)[:numel].to(dtype)
