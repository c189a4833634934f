"""A folder of features on disk.

    manifest.json             what was asked, of which model and loader; at the end how many samples there are
    batch-00000012.safetensors  the features of batch 12 and those after it, one tensor a site, samples first

A file is written under another name, forced to the disk and renamed, so whatever has its name is whole. Its own header
says which batches it holds: nothing else need agree with it after a crash.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from retrograd.core.errors import FeatureError
from retrograd.core.files import to_utf8, write_whole
from retrograd.core.foreign.sums import check_sum, sum_tensor
from retrograd.core.foreign.text import check_kinds, expect_file, parse_object, read_json
from retrograd.core.limits import LIMITS

FORMAT = 2
MANIFEST = "manifest.json"
LOCK = ".lock"

_NOTE = "retrograd"
_SHARD = re.compile(r"batch-(\d{8,})\.safetensors")


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of features.

    Attributes:
        path: where it is.
        first_batch, batches: which batches it holds.
        samples: how many samples these have.
        shapes, dtypes: by site; the first dimension is that of the samples.
        sums: by site, over all of its bytes.
    """

    path: Path
    first_batch: int
    batches: int
    samples: int
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    sums: Mapping[str, int]
    _seen: set[str] = field(default_factory=set)

    def read(self, site: str, start: int, stop: int) -> Tensor:
        """Rows of one site, read from the disk. The first time all of its rows are, to see that they are right.

        Raises:
            FeatureError: the file cannot be read, or is not what was written.
        """
        try:
            with safetensors.safe_open(expect_file(self.path), "pt") as file:
                if site not in self._seen:
                    check_sum(file.get_tensor(site), self.sums[site], site)
                    self._seen.add(site)
                rows: Tensor = file.get_slice(site)[start:stop]
                return rows
        except (safetensors.SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise _damaged(self.path, error) from error


def write_shard(folder: Path, first_batch: int, batches: list[dict[str, Tensor]]) -> None:
    """Write the features of consecutive batches; the same first batch has the same file.

    Raises:
        OSError: it cannot be written.
    """
    features = {site: torch.cat([batch[site] for batch in batches]) for site in batches[0]}
    samples = len(next(iter(features.values())))
    sums = {site: sum_tensor(feature) for site, feature in features.items()}
    note = {"first_batch": first_batch, "batches": len(batches), "samples": samples, "crc32": sums}
    data = safetensors.torch.save(features, {_NOTE: json.dumps(note)})
    _write_durably(folder / f"batch-{first_batch:08d}.safetensors", data)


def list_shards(folder: Path) -> list[Shard]:
    """The files of a folder, in the order of their batches.

    Raises:
        FeatureError: one cannot be read, or batches between two are missing.
    """
    shards = [_read_header(path) for path in sorted(folder.iterdir()) if _SHARD.fullmatch(path.name)]
    shards.sort(key=lambda shard: shard.first_batch)
    expected = 0
    for shard in shards:
        _compare(shards[0], shard)
        if shard.first_batch != expected:
            raise FeatureError(
                f"In {str(folder)!r} the batches from {expected} to {shard.first_batch - 1} are missing.",
                repair="remove the files of later batches too and extract again, which goes on from there.",
            )
        expected += shard.batches
    return shards


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifest.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps({"format": FORMAT, **content}, indent=2, ensure_ascii=False)
    _write_durably(folder / MANIFEST, to_utf8(text))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest; None where there is none.

    Raises:
        FeatureError: it cannot be read, or was written by a later version.
    """
    path = folder / MANIFEST
    try:
        content = read_json(path)
        check_kinds(content, {"asked": dict[str, Any], "features": dict[str, Any], "complete": bool, "samples": int})
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if content.get("format") != FORMAT:
        raise FeatureError(
            f"{str(path)!r} has the format {content.get('format')!r}, and this version reads {FORMAT}.",
            repair="install the version of retrograd that wrote it.",
        )
    if "asked" not in content:
        raise _damaged(path, "it does not say what was asked for")
    return content


def _write_durably(path: Path, data: bytes) -> None:
    with write_whole(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_header(path: Path) -> Shard:
    try:
        with safetensors.safe_open(expect_file(path), "pt") as file:
            note = parse_object((file.metadata() or {})[_NOTE])
            check_kinds(note, {"first_batch": int, "batches": int, "samples": int, "crc32": dict[str, int]})
            sites = sorted(file.keys())
            slices = {site: file.get_slice(site) for site in sites}
            shard = Shard(
                path,
                note["first_batch"],
                note["batches"],
                note["samples"],
                {site: tuple(slices[site].get_shape()) for site in sites},
                {site: slices[site][:0].dtype for site in sites},
                note["crc32"],
            )
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        raise _damaged(path, error) from error
    _check(shard)
    return shard


def _check(shard: Shard) -> None:
    """Check that what a header says of batches and samples is what its name and its tensors say.

    Raises:
        FeatureError: it is not.
    """
    match = _SHARD.fullmatch(shard.path.name)
    if match is None or int(match[1]) != shard.first_batch or shard.batches < 1:
        raise _damaged(shard.path, f"it says that it holds {shard.batches} batches from {shard.first_batch} on")
    if any(shape[:1] != (shard.samples,) for shape in shard.shapes.values()):
        raise _damaged(shard.path, f"not every feature in it is of {shard.samples} samples")
    if shard.sums.keys() != shard.shapes.keys():
        raise _damaged(shard.path, "it lacks the sum over a feature")


def _compare(first: Shard, shard: Shard) -> None:
    """Check that a shard holds the same features as the first, with rows of the same shapes.

    Raises:
        FeatureError: it does not.
    """
    rows = [{site: shape[1:] for site, shape in each.shapes.items()} for each in (first, shard)]
    if rows[0] != rows[1] or first.dtypes != shard.dtypes:
        raise _damaged(shard.path, f"its features are not those of {first.path.name}")


def _damaged(path: Path, error: Exception | str) -> FeatureError:
    return FeatureError(
        f"{str(path)!r} cannot be read: {error}.",
        repair="remove it, and the files of later batches, and extract again, which goes on from there.",
    )


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
        if size >= LIMITS.shard_bytes or time.monotonic() - self._written >= LIMITS.shard_seconds:
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
    """Make the error for a disk that is full, or does not take a file for another reason."""
    return FeatureError(
        f"{str(folder)!r} cannot be written: {error.strerror or error}.",
        repair="make room, or fix what is wrong there, and call it again with the same arguments.",
        reason="what was written before is whole, and the extraction goes on after it.",
    )
