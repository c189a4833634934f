"""Features on disk, opened: by site, and read where they are asked for."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrograd.core.errors import FeatureError
from retrograd.tools.features.folder import Shard, list_shards, read_manifest


def open_features(folder: str | Path) -> StoredFeatures:
    """Open what :func:`extract_dataset` has written, also while it is not complete.

    Raises:
        FeatureError: the folder holds no features, or a file of it cannot be read.
    """
    folder = Path(folder).absolute()  # it is read when something is asked for
    manifest = read_manifest(folder)
    if manifest is None:
        raise FeatureError(f"{str(folder)!r} holds no features.", repair="write some with rg.extract_dataset.")
    shards = list_shards(folder)
    if missing := [name for name in manifest.get("features", {}) if shards and name not in shards[0].shapes]:
        raise FeatureError(
            f"{str(shards[0].path)!r} holds no {missing[0]!r}, which the manifest lists.",
            repair="extract again, into another folder.",
        )
    return StoredFeatures(folder, manifest, shards)


class StoredFeatures(Mapping[str, "StoredFeature"]):
    """The features of a dataset, by the names that were asked for.

    Attributes:
        folder: where they are.
        samples: how many samples there are, each with a row in every feature.
        is_complete: the extraction went through to the end.
        asked: what the extraction was given, as text.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], shards: list[Shard]) -> None:
        self.folder = folder
        self.samples = sum(shard.samples for shard in shards)
        self.is_complete = bool(manifest.get("complete"))
        self.asked: dict[str, Any] = manifest["asked"]
        self._features = {name: StoredFeature(name, shards) for name in manifest.get("features", {}) if shards}

    def __getitem__(self, name: str) -> StoredFeature:
        return self._features[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def __repr__(self) -> str:
        parts = [f"{name}: {list(feature.shape)} {feature.dtype}" for name, feature in self.items()]
        return f"StoredFeatures({str(self.folder)!r}, {'; '.join(parts)}{'' if self.is_complete else '; not complete'})"


class StoredFeature(Sequence[Tensor]):
    """A feature of all samples: ``feature[10:20]`` reads these rows from the disk and nothing else.

    Rows are given as tensors in memory: one by an integer; several by a slice, or a list or tensor of integers or
    of a bool for each sample. Further indices are for what is within a row: ``feature[10:20, 0]``.

    Attributes:
        name: as it was asked for.
        shape: of all of it; samples first.
        dtype: torch's.
    """

    def __init__(self, name: str, shards: list[Shard]) -> None:
        self.name = name
        self._shards = shards
        self._ends = list(itertools.accumulate(shard.samples for shard in shards))
        self.shape = torch.Size((self._ends[-1], *shards[0].shapes[name][1:]))
        self.dtype = shards[0].dtypes[name]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:  # type: ignore[override]
        if isinstance(index, tuple):
            rows, rest = self[index[0]], index[1:]
            return rows[rest] if _is_integer(index[0]) else rows[(slice(None), *rest)]
        if isinstance(index, slice):
            return self._read(np.arange(len(self))[index])
        if _is_integer(index):
            return self._read(self._normalise(np.array([operator.index(index)])))[0]
        return self._read(self._normalise(np.asarray(index)))

    def __iter__(self) -> Iterator[Tensor]:
        for shard in self._shards:
            yield from shard.read(self.name, 0, shard.samples)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self[:].numpy().astype(dtype) if dtype is not None else self[:].numpy()

    def __repr__(self) -> str:
        return f"StoredFeature({self.name!r}, {list(self.shape)}, {self.dtype})"

    def _normalise(self, index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Row numbers from 0 on."""
        if index.dtype == bool:
            if index.shape != (len(self),):
                raise IndexError(f"a mask of {index.shape} for {len(self)} samples")
            return np.flatnonzero(index)
        index = index.astype(np.int64) if index.size == 0 else index
        if index.ndim != 1 or index.dtype.kind not in "iu":
            raise TypeError("rows are chosen by an integer, a slice, or a list of integers or bools")
        rows = np.where(index < 0, index + len(self), index)
        if rows.size and (rows.min() < 0 or rows.max() >= len(self)):
            raise IndexError(f"row out of range: there are {len(self)} samples")
        return rows

    def _read(self, rows: np.ndarray[Any, Any]) -> Tensor:
        result = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        numbers = np.searchsorted(self._ends, rows, side="right")
        for number in np.unique(numbers):
            places = np.flatnonzero(numbers == number)
            begin = self._ends[number] - self._shards[number].samples
            inside = rows[places] - begin
            first, last = int(inside.min()), int(inside.max())
            block = self._shards[number].read(self.name, first, last + 1)
            result[torch.from_numpy(places)] = block[torch.from_numpy(inside - first)]
        return result


def _is_integer(index: object) -> bool:
    return isinstance(index, (int, np.integer)) and not isinstance(index, bool)
