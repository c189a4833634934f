"""The features of a whole dataset, on disk."""

from __future__ import annotations

import hashlib
import itertools
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from retrograd.core.addresses import local_folder
from retrograd.core.amounts import count_of
from retrograd.core.errors import FeatureError
from retrograd.core.files import remove_unfinished
from retrograd.core.notices import warn
from retrograd.core.randomness import random_kept
from retrograd.core.ranks.placements import local_part, shard_again
from retrograd.core.ranks.processes import describe_process
from retrograd.core.runs.lock import Lock
from retrograd.tools.features.batches import (
    Part,
    check_order,
    count_batches,
    count_samples,
    find_input,
    find_target,
    move,
    skip_batches,
)
from retrograd.tools.features.conversion import Conversion, Pool, describe_pool, find_dtype
from retrograd.tools.features.extractor import Extractor
from retrograd.tools.features.folder import (
    LOCK,
    ShardWriter,
    explain_unwritable,
    list_shards,
    read_manifest,
    write_manifest,
)
from retrograd.tools.features.stored import StoredFeatures, open_features

if TYPE_CHECKING:
    from rich.progress import Progress

TARGET = "target"
"""The name under which targets are stored."""

_DIFFER_IN_TRAINING = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def extract_dataset(
    model: nn.Module,
    loader: Iterable[Any],
    sites: str | Iterable[str],
    folder: str | Path,
    *,
    pool: Pool = None,
    dtype: torch.dtype | str | None = None,
    inputs: Part | None = None,
    target: Part | None = None,
    device: torch.device | str | None = None,
    allow_shuffle: bool = False,
    progress: bool = True,
) -> StoredFeatures:
    """The features of all batches of a loader, written to a folder as they come.

    Each forward ends right after the last site, as in :func:`extract`. About 64 MB of features are held at a time;
    then, or after a minute, they become a file. When the process is killed, or the disk is full, the same call
    goes on after the last file; once everything is there it only opens the folder. That takes for granted that the
    loader yields the same batches in the same order each time.

    Args:
        model: as in :func:`extract`; put it into ``eval`` mode first.
        loader: yields batches: tensors, tuples or lists whose first element is the model's input, or dicts of the
            model's keyword arguments.
        sites: as in :func:`extract`; each must be one tensor with the samples first.
        folder: made if it is not there. Of several processes each needs one of its own.
        pool: what is stored of a feature. ``"mean"`` and ``"max"`` keep batch and channels and reduce all other
            dimensions: [N, tokens, channels] and [N, channels, *places] become [N, channels]. A function gets the
            feature of a batch and returns what is stored. None stores all of it.
        dtype: to store floating features in, such as ``torch.float16``.
        inputs: where the model's input is in a batch, if not as above: a key, an index, or a function.
        target: likewise where the target of each sample is; stored as ``"target"``, as it is.
        device: tensors of the input are moved there.
        allow_shuffle: accept a loader that shuffles, whose order must then be the same each time.
        progress: tell on stderr how far it is: a bar on a terminal, else a line every ten seconds.

    Returns:
        The opened folder: site → tensor on disk.

    Raises:
        FeatureError: the arguments make no sense together, or are not those of the extraction that the folder holds;
            a feature is not a tensor with a row for each sample, or changes its shape; the disk is full.
        NoSuchSiteError: the model has no such site.
    """
    folder = local_folder(folder)  # the loader may change the directory
    texts = [sites] if isinstance(sites, str) else list(sites)
    check_order(loader, allow_shuffle=allow_shuffle)
    conversion = Conversion(pool, dtype)
    extractor = Extractor(model, texts, conversion.hold)
    if target is not None and TARGET in texts:
        raise FeatureError(f"Both a site and the target are called {TARGET!r}.", repair="ask for 'target:output'.")
    asked = {
        "sites": texts,
        "pool": describe_pool(pool),
        "dtype": None if dtype is None else str(find_dtype(dtype)),
        "inputs": _describe_part(inputs),
        "target": _describe_part(target),
        "model": fingerprint_model(model),
        "training": model.training,
        "batches": count_batches(loader),
        "batch_size": getattr(loader, "batch_size", None),
        "process": describe_process(),
    }
    lock = _lock_folder(folder)
    try:
        manifest = _begin(folder, asked)
        if not manifest.get("complete"):
            _warn_of_training_mode(model)
            source = _BatchSource(loader, inputs, target, device)
            _extract_rest(extractor, source, folder, manifest, progress=progress)
        return open_features(folder)
    finally:
        lock.release()


class _BatchSource:
    """Features batch by batch, beginning in the middle."""

    def __init__(
        self, loader: Iterable[Any], inputs: Part | None, target: Part | None, device: torch.device | str | None
    ) -> None:
        self._loader = loader
        self._inputs, self._target, self._device = inputs, target, device
        self.total = count_batches(loader)

    def extract(self, extractor: Extractor, first: int) -> Iterable[tuple[dict[str, torch.Tensor], int]]:
        """The features of each batch from the one with this number on, and how many samples it has."""
        for item in skip_batches(self._loader, first):
            args, kwargs = move(find_input(item, self._inputs, self._target), self._device)
            features = extractor.run(args, kwargs)
            if self._target is not None:
                features[TARGET] = find_target(item, self._target)
            yield features, count_samples((args, kwargs))


def _extract_rest(
    extractor: Extractor, source: _BatchSource, folder: Path, manifest: dict[str, Any], *, progress: bool
) -> None:
    """Extract from the first batch that is not there to the last."""
    done = sum(shard.batches for shard in list_shards(folder))
    with (
        random_kept(),  # loaders draw a seed from torch's generator
        ProgressReport(done, source.total, shown=progress) as report,
        ShardWriter(folder, done, manifest["features"]) as writer,
    ):
        for features, samples in source.extract(extractor, done):
            writer.add(features, samples)
            if not manifest["features"]:
                manifest["features"] = writer.spec
                _write_manifest(folder, manifest)
            report.advance(samples)
    shards = list_shards(folder)
    if not shards:
        raise FeatureError("The loader yields no batch.", repair="check its dataset, and drop_last.")
    manifest |= {
        "complete": True,
        "samples": sum(shard.samples for shard in shards),
        "batches": sum(shard.batches for shard in shards),
    }
    _write_manifest(folder, manifest)


def _begin(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """The manifest of the extraction that the folder holds, or of a new one.

    Raises:
        FeatureError: the folder holds something else.
    """
    remove_unfinished(folder)
    manifest = read_manifest(folder)
    others = sorted(path.name for path in folder.iterdir() if path.name != LOCK)
    if manifest is None and others:
        raise FeatureError(
            f"{str(folder)!r} already holds something else: {', '.join(others[:3])}.", repair="choose a new folder."
        )
    if manifest is None or not list_shards(folder):  # nothing is there that could differ
        manifest = {"asked": asked, "features": {}}
        _write_manifest(folder, manifest)
    differing = [key for key in asked if manifest["asked"].get(key) != asked[key]]
    if differing:
        told = "; ".join(f"{key} {manifest['asked'].get(key)!r} there, {asked[key]!r} now" for key in differing)
        raise FeatureError(
            f"{str(folder)!r} holds an extraction with other arguments: {told}.",
            repair="choose a new folder, or delete this one.",
            reason="its rows would not all mean the same.",
        )
    return manifest


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    try:
        write_manifest(folder, manifest)
    except OSError as error:
        raise explain_unwritable(folder, error) from error


def _lock_folder(folder: Path) -> Lock:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder / LOCK)
        if lock.acquire():
            return lock
    except OSError as error:
        raise explain_unwritable(folder, error) from error
    raise FeatureError(
        f"Another process is extracting into {str(folder)!r}.", repair="wait for it, or choose another folder."
    )


def _describe_part(part: Part | None) -> str | int | None:
    return describe_pool(part) if callable(part) else part


def _warn_of_training_mode(model: nn.Module) -> None:
    """Warn that features will depend on chance or on the other samples of a batch."""
    for name, module in model.named_modules():
        if module.training and isinstance(module, _DIFFER_IN_TRAINING):
            warn(
                f"{name!r} is in training mode, so features depend on chance or on the batch; call model.eval() first."
            )
            return


_SECONDS_A_LINE = 10.0
_SECONDS_A_FRAME = 0.1


class ProgressReport:
    """Print on stderr how many batches are done.

    Args:
        done: batches that an earlier extraction has done.
        total: all batches; None if nobody knows.
        shown: otherwise nothing is printed.
    """

    def __init__(self, done: int, total: int | None, *, shown: bool) -> None:
        self._done, self._total, self._samples = done, total, 0
        self._shown = shown
        self._next = time.monotonic() + _SECONDS_A_LINE
        self._bar = self._open_bar() if shown and sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._show()
        if self._bar is not None:
            self._bar.stop()

    def advance(self, samples: int) -> None:
        """A batch of so many samples is done."""
        self._done += 1
        self._samples += samples
        if self._shown and time.monotonic() >= self._next:
            self._show()

    def _open_bar(self) -> Progress:
        with random_kept():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        columns = (TextColumn("features"), BarColumn(), MofNCompleteColumn(), TextColumn("batches"))
        self._next = time.monotonic()
        console = Console(stderr=True)
        bar = Progress(*columns, TimeRemainingColumn(), console=console, auto_refresh=False)  # no thread of its own
        bar.add_task("features", total=self._total, completed=self._done)
        return bar

    def _show(self) -> None:
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, refresh=True)
            self._next = now + _SECONDS_A_FRAME
        elif self._shown:
            total = "" if self._total is None else f" of {self._total:,}"
            print(
                f"features: {self._done:,}{total} batches, {count_of(self._samples, 'sample')} in this call",
                file=sys.stderr,
            )
            self._next = now + _SECONDS_A_LINE


_MOST_ELEMENTS = 1024


def fingerprint_model(model: nn.Module) -> str:
    """The model's type, and a hash of the names, shapes and types of its parameters and buffers and of some values.

    Of each plain tensor up to about 1,024 elements are read, evenly spaced: training changes nearly all of them. Of one
    that is sharded, they are those of this process.
    """
    shard_again(model)
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {tensor.dtype}".encode())
        if not torch.nn.parameter.is_lazy(tensor):
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(_sample(tensor))
    return f"{type(model).__name__} {digest.hexdigest()}"


def _sample(tensor: Tensor) -> bytes:
    tensor = local_part(tensor)
    if isinstance(tensor, nn.Parameter):
        tensor = tensor.data
    has_memory = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
    if not has_memory or tensor.is_quantized:
        return b""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // _MOST_ELEMENTS)].cpu().contiguous()
    return some.as_strided((len(some),), (1,)).view(torch.uint8).numpy().tobytes() if len(some) else b""
