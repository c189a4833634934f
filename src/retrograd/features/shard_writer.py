"""Gathers the features of batches until they are worth a file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from retrograd.errors import FeatureError
from retrograd.features.folder import write_shard

SHARD_BYTES = 64 << 20
SHARD_SECONDS = 60.0
"""A file is written at the latest after so many bytes, or seconds: what a killed process has to do again."""

Spec = dict[str, dict[str, Any]]
"""Of each feature the shape of a sample's row, and the dtype, as a manifest has them."""


class ShardWriter:
    """Writes the features of one batch after the other. At the end of its block it writes what it has.

    That is so when the block is left by an exception as well: the batches that were added are complete.

    Args:
        folder: where to.
        first_batch: the number of the batch that is added first.
        spec: what every batch must look like; empty before the first one.
    """

    def __init__(self, folder: Path, first_batch: int, spec: Spec) -> None:
        self.spec = spec
        self.samples = 0
        self._folder = folder
        self._first_batch = first_batch
        self._batches: list[dict[str, Tensor]] = []
        self._written = time.monotonic()
        self._has_failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._has_failed:
            self.flush()

    def add(self, features: dict[str, Tensor], samples: int) -> None:
        """Take the features of the next batch.

        Raises:
            FeatureError: they do not fit those of the batches before, or the file cannot be written.
        """
        self._check(features, samples)
        self._batches.append(features)
        self.samples += samples
        size = sum(tensor.nbytes for batch in self._batches for tensor in batch.values())
        if size >= SHARD_BYTES or time.monotonic() - self._written >= SHARD_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what has been added.

        If this is interrupted, the next time writes the same file, so no batch is there twice.

        Raises:
            FeatureError: the file cannot be written.
        """
        if not self._batches:
            return
        try:
            write_shard(self._folder, self._first_batch, self._batches)
        except OSError as error:
            self._has_failed = True
            raise explain_unwritable(self._folder, error) from error
        self._first_batch, self._batches = self._first_batch + len(self._batches), []
        self._written = time.monotonic()

    def _check(self, features: dict[str, Tensor], samples: int) -> None:
        for name, tensor in features.items():
            if not tensor.dim() or len(tensor) != samples:
                raise FeatureError(
                    f"{name!r} is {list(tensor.shape)}, and the batch has {samples} samples.",
                    repair="give a function as `pool` that returns a tensor with the samples first.",
                    reason="row i of a feature must be that of sample i.",
                )
        spec = describe_features(features)
        self.spec = self.spec or spec
        for name in {**self.spec, **spec}:
            now, before = _print_spec(spec, name), _print_spec(self.spec, name)
            if now != before:
                raise FeatureError(
                    f"{name!r} is {now} in this batch, and was {before} before.",
                    repair="pool over what differs in length (pool='mean' or a function), or pad the batches alike.",
                )


def describe_features(features: Mapping[str, Tensor]) -> Spec:
    """Shapes and dtypes of the features of a batch."""
    return {
        name: {"shape": list(tensor.shape[1:]), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in features.items()
    }


def _print_spec(spec: Spec, name: str) -> str:
    return f"{spec[name]['shape']} {spec[name]['dtype']} a sample" if name in spec else "missing"


def explain_unwritable(folder: Path, error: OSError) -> FeatureError:
    """What to say when the disk is full, or does not take a file for another reason."""
    return FeatureError(
        f"{str(folder)!r} cannot be written: {error.strerror or error}.",
        repair="make room, or fix what is wrong there, and call it again with the same arguments.",
        reason="what was written before is whole, and the extraction goes on behind it.",
    )
