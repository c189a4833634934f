"""Layers with nothing between them, and weights that are shared by accident, or no longer shared."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.core.groups import reach
from retrograd.core.history.facts import Parameter
from retrograd.core.runs.findings import Finding
from retrograd.core.sites.site import ROOT
from retrograd.explaining.findings.chain import AFFINE, VIEWS, Chain
from retrograd.explaining.findings.entry import Entry, Family
from retrograd.explaining.findings.record import CannotTell, Record

family = Family(__name__)

THROUGH = VIEWS | {"dropout", "batch_norm"}
"""Functions between two affine layers that leave them one affine map."""

_LINEAR = AFFINE | THROUGH | {
    "add", "sub", "mean", "sum", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "zeros", "ones",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "interpolate",
    "upsample", "pad", "cat", "stack", "roll", "flip", "fold", "unfold", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d",
}  # fmt: skip

_OF_WEIGHTS = VIEWS | {"mv", "dot", "vdot", "normalize", "norm", "linalg_norm", "detach", "mul", "div", "weight_norm"}
"""Functions by which spectral_norm and weight_norm make a weight."""


@family.detector("missing-nonlinearity")
def missing_nonlinearity(record: Record, entry: Entry) -> Iterator[Finding]:
    """A stack of affine layers without an activation."""
    if record.is_staged:
        raise CannotTell("the model is split into stages of a pipeline, of which each is seen alone")
    for chain in record.need_chains():
        pairs = find_pairs(chain)
        if not pairs or not _is_affine(chain) or any(_narrows(chain, *pair) for pair in pairs):
            continue
        layers = sorted({each for pair in pairs for each in pair})
        yield entry.finding_at(
            record,
            chain,
            layers[1],
            f"There is no activation between the {len(layers)} affine layers of the model, so together they are a "
            "single affine map",
            evidence=[
                ("affine layers one after the other", len(layers), "≥ 2"),
                ("other functions in the model", 0, "none"),
            ],
        )
        return


def find_pairs(chain: Chain) -> list[tuple[int, int]]:
    """Affine layers, each with the one that made its input."""
    layers = [each for each in sorted(chain.of_outputs) if chain.name(each) in AFFINE]
    made = {each: chain.maker(each, 0, THROUGH) for each in layers}
    return [(before, each) for each, before in made.items() if before in made]


def _is_affine(chain: Chain) -> bool:
    """Check whether all that the model's outputs are made of is affine."""
    data = _list_data(chain)
    weights = [chain.name(each) for each in chain.of_outputs - data]
    return bool(data) and all(each in _OF_WEIGHTS for each in weights) and all(_is_affine_one(chain, e) for e in data)


def _list_data(chain: Chain) -> frozenset[int]:
    """The operations that data pass through, and not those that make weights of layers."""

    def list_taken(number: int) -> list[int]:
        is_layer = chain.name(number) in AFFINE - {"addmm", "baddbmm"}
        taken = chain.listed[number].operands[:1] if is_layer else chain.operands(number)
        return [each for each in taken if each >= 0]

    return frozenset(reach(chain.outputs, list_taken))


def _is_affine_one(chain: Chain, number: int) -> bool:
    name = chain.name(number)
    return name in _LINEAR or (name in ("mul", "div") and len(chain.operands(number)) <= 1)


def _narrows(chain: Chain, before: int, behind: int) -> bool:
    """Check whether what lies between two layers is narrower than both what goes in and what comes out."""
    place = 1 if chain.name(before).startswith("conv") else -1
    sizes = [(chain.taken(before) or ()), chain.made(before), chain.made(behind)]
    if min(map(len, sizes)) < 2:
        return True
    wide, narrow, end = (each[place] for each in sizes)
    return narrow < wide and narrow < end


# ---- shared weights ----

CONTAINERS = ("Sequential", "ModuleList")
"""Containers that name their children by their places."""


@family.detector("weights-untied")
def weights_untied(record: Record, entry: Entry) -> Iterator[Finding]:
    """Two weights begin as copies and drift apart."""
    looks = {
        name: known
        for name, listed in record.looks.items()
        if (known := [each for each in listed if each.digest and len(each.shape) == 2])
    }
    if not looks:
        raise CannotTell("no digests of parameters were recorded")
    for first, second in _pair_equal(record, looks):
        apart = _find_apart(looks[first], looks[second])
        if apart is not None:
            yield entry.finding(
                f"{first} and {second} are equal at step {looks[first][0].step} and differ at step {apart}: they "
                "are two copies and not tied",
                site=second,
                step=apart,
                line=record.line_of(second),
                evidence=[("shape", str(list(looks[first][0].shape))), ("equal bit for bit", "at first")],
                checked=[f"one is of an embedding, the other of a {record.type_of(second) or 'parameter'}"],
            )


def _pair_equal(record: Record, looks: dict[str, list[Parameter]]) -> Iterator[tuple[str, str]]:
    """An embedding's weight and another's that are equal at the first look."""
    embeddings = [name for name in looks if record.type_of(name) == "Embedding"]
    for first in embeddings:
        for second in looks:
            is_other = second not in embeddings and second not in looks[first][0].tied
            if is_other and looks[first][0].digest == looks[second][0].digest:
                yield first, second


def _find_apart(first: list[Parameter], second: list[Parameter]) -> int | None:
    """The first step at which both were looked at and differ."""
    others = {fact.step: fact.digest for fact in second}
    return next((fact.step for fact in first if others.get(fact.step, fact.digest) != fact.digest), None)


@family.detector("shared-weights")
def shared_by_accident(record: Record, entry: Entry) -> Iterator[Finding]:
    """A module stands several times in a container."""
    calls = _count_calls(record)
    for container, missing in _find_gaps(record).items():
        children = [path for path in record.modules if path != ROOT and path.rpartition(".")[0] == container]
        shared = {child: _calls_within(child, calls) for child in children}
        shared = {child: count for child, count in shared.items() if count > 1}
        if len(shared) == 1 and (missing == 0 or next(iter(shared.values())) == missing + 1):
            yield _describe(entry, record, container, missing, *next(iter(shared.items())))


def _describe(entry: Entry, record: Record, container: str, missing: int, child: str, count: int) -> Finding:
    kind = record.type_of(container or ROOT)
    return entry.finding(
        f"The module {child} stands at {count} places of a {kind} and is called {count} times a forward: its "
        f"{count} places share one set of weights",
        site=child,
        line=record.line_of(container or ROOT),
        evidence=[("places", count, "> 1"), ("calls a forward", count, "> 1")],
        checked=[
            f"{missing} numbers are missing among the children of the {kind}"
            if missing
            else f"it is the only child of the {kind}"
        ],
    )


def _find_gaps(record: Record) -> dict[str, int]:
    """Count the numbers that are missing among the children of each container; 0 where it has one child alone."""
    found = {}
    for path in record.modules:
        container = "" if path == ROOT else path
        if not record.type_of(path).endswith(CONTAINERS):
            continue
        names = [each for each in record.modules if each != ROOT and each.rpartition(".")[0] == container]
        numbers = [int(tail) for each in names if (tail := each.rpartition(".")[2]).isdigit()]
        missing = max(numbers, default=0) + 1 - len(numbers)
        if len(numbers) == len(names) > 0 and (missing > 0 or numbers == [0]):
            found[container] = missing
    return found


def _count_calls(record: Record) -> dict[str, int]:
    """Count how often the operation with a weight of each module is called in the first forward that was noted."""
    found: dict[str, int] = {}
    for chain in record.chains[:1]:
        for number, operation in enumerate(chain.listed):
            if operation.module and chain.name(number) in AFFINE | {"batch_norm", "layer_norm", "lstm", "gru"}:
                found[operation.module] = found.get(operation.module, 0) + 1
    return found


def _calls_within(path: str, calls: dict[str, int]) -> int:
    """Count the calls of a module with parameters, by the operations of what is in it."""
    counts = [count for module, count in calls.items() if module == path or module.startswith(f"{path}.")]
    return min(counts, default=0)
