"""Layers with nothing between them, which are together no more than one."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.findings.chain import AFFINE, VIEWS, Chain
from retrograd.findings.detector import Detector, Words
from retrograd.findings.detectors.loss_chain import list_chains, place_of
from retrograd.findings.finding import Evidence, Finding
from retrograd.findings.record import Record

THROUGH = VIEWS | {"dropout", "batch_norm"}
"""What keeps two affine layers one affine map."""

_LINEAR = AFFINE | THROUGH | {
    "add", "sub", "mean", "sum", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "zeros", "ones",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "interpolate",
    "upsample", "pad", "cat", "stack", "roll", "flip", "fold", "unfold", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d",
}  # fmt: skip

_OF_WEIGHTS = VIEWS | {"mv", "dot", "vdot", "normalize", "norm", "linalg_norm", "detach", "mul", "div", "weight_norm"}
"""What spectral_norm and weight_norm make a weight by."""


class MissingNonlinearity(Detector):
    """A stack of affine layers without an activation."""

    slug = "missing-nonlinearity"
    words = Words(
        says="The model is a stack of affine layers without an activation, so it can do no more than a single one.",
        example="There is no activation between the 3 affine layers of the model, so together they are a single "
        "affine map.",
        threshold="at least 2 affine layers one after the other that do not narrow in between, and no other function "
        "in the whole model",
        source="UMLAUT (CHI 2021) names the fault",
        guard="bottlenecks (linear autoencoders, factorised or low-rank layers) and models with any function that is "
        "not affine are left alone",
        repair="put an activation, such as ReLU, between the layers.",
    )
    explains = ("loss-flat", "learning-rate-too-low", "loss-noisy")

    def check(self, record: Record) -> Iterator[Finding]:
        """See :class:`Detector`."""
        for chain in list_chains(record):
            pairs = find_pairs(chain)
            if not pairs or not _is_affine(chain) or any(_narrows(chain, *pair) for pair in pairs):
                continue
            layers = sorted({each for pair in pairs for each in pair})
            site, line = place_of(record, chain, layers[1])
            yield self.find(
                "warning",
                f"There is no activation between the {len(layers)} affine layers of the model, so together they are a "
                "single affine map",
                site=site,
                step=chain.step,
                line=line,
                evidence=[
                    Evidence("affine layers one after the other", len(layers), "≥ 2"),
                    Evidence("other functions in the model", 0, "none"),
                ],
                precondition=["no layer between is narrower than what it is given and what is made of it"],
                refute="a deep linear model is meant",
            )
            return


def find_pairs(chain: Chain) -> list[tuple[int, int]]:
    """Affine layers, each with the one that made its input."""
    layers = [each for each in sorted(chain.of_outputs) if chain.name(each) in AFFINE]
    made = {each: chain.maker(each, 0, THROUGH) for each in layers}
    return [(before, each) for each, before in made.items() if before in made]


def _is_affine(chain: Chain) -> bool:
    """Whether all that the model's outputs are made of is affine."""
    data = _list_data(chain)
    weights = [chain.name(each) for each in chain.of_outputs - data]
    return bool(data) and all(each in _OF_WEIGHTS for each in weights) and all(_is_affine_one(chain, e) for e in data)


def _list_data(chain: Chain) -> frozenset[int]:
    """The operations that data pass through, and not those that make weights of layers."""
    found, waiting = set(chain.outputs), list(chain.outputs)
    while waiting:
        number = waiting.pop()
        is_layer = chain.name(number) in AFFINE - {"addmm", "baddbmm"}
        taken = chain.listed[number].operands[:1] if is_layer else chain.operands(number)
        new = {each for each in taken if each >= 0} - found
        found |= new
        waiting += new
    return frozenset(found)


def _is_affine_one(chain: Chain, number: int) -> bool:
    name = chain.name(number)
    return name in _LINEAR or (name in ("mul", "div") and len(chain.operands(number)) <= 1)


def _narrows(chain: Chain, before: int, behind: int) -> bool:
    """Whether what lies between two layers is narrower than both what goes in and what comes out."""
    place = 1 if chain.name(before).startswith("conv") else -1
    sizes = [(chain.taken(before) or ()), chain.made(before), chain.made(behind)]
    if min(map(len, sizes)) < 2:
        return True
    wide, narrow, end = (each[place] for each in sizes)
    return narrow < wide and narrow < end
