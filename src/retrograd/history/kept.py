"""A tensor that was kept, as it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex, overload

from retrograd.history.sink import KeptTensor, Moment, Phase
from retrograd.sites.site import parse_leniently

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Kept:
    """A kept tensor.

    Attributes:
        moment: when it was kept.
        site: where.
        load: returns the tensor, or None if it was overwritten.
        rank: on which rank.
    """

    moment: Moment
    site: str
    load: Callable[[], torch.Tensor | None]
    rank: int = 0

    @property
    def step(self) -> int:
        return self.moment.step

    @property
    def micro(self) -> int:
        return self.moment.micro

    @property
    def backward(self) -> int:
        return self.moment.backward

    @property
    def phase(self) -> Phase:
        return self.moment.phase

    @property
    def call(self) -> int:
        """Of which call of the module, from 1."""
        return parse_leniently(self.site).call

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor with the loss scale divided out; None if training changed it in place since."""
        return self.load()

    @property
    def overwritten(self) -> bool:
        """Whether training changed the tensor in place after it was kept, so that it is lost."""
        return self.load() is None

    def __repr__(self) -> str:
        tensor = self.tensor
        what = "overwritten" if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        return f"Kept({self.site!r}, step {self.step}, {what})"


class KeptTensors(list[Kept]):
    """What was kept of a site, oldest first.

    Args:
        kept: in that order.
        explain: makes the error for whoever asks for one where there is none.
    """

    def __init__(self, kept: Iterable[Kept], explain: Callable[[], Exception]) -> None:
        super().__init__(kept)
        self._explain = explain

    @overload
    def __getitem__(self, index: SupportsIndex) -> Kept: ...
    @overload
    def __getitem__(self, index: slice) -> list[Kept]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Kept | list[Kept]:
        if not self and not isinstance(index, slice):
            raise self._explain()
        return super().__getitem__(index)


def read_kept(kept: KeptTensor) -> Kept:
    """A tensor that is still held by reference."""
    return Kept(kept.moment, kept.site, lambda: None if is_overwritten(kept) else unscale(kept.tensor, kept.scale))


def is_overwritten(kept: KeptTensor) -> bool:
    """Whether the tensor has been changed in place since it was kept; once it was, it stays so.

    A tensor made in inference mode counts no versions, so whoever keeps one must keep a copy.
    """
    if not kept.tensor.is_inference() and kept.tensor._version != kept.version:
        kept.overwritten = True
    return kept.overwritten


def unscale(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """Divide the loss scale out. Half precision becomes float32, for small gradients would vanish in it."""
    if scale == 1.0:
        return tensor
    return (tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor) / scale
