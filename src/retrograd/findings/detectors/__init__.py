"""The detectors: one fault, or one family, a file."""

from retrograd.findings.detector import Detector
from retrograd.findings.detectors.batch_norm import BatchNorm
from retrograd.findings.detectors.depth import Exploding, Vanishing
from retrograd.findings.detectors.hyper_parameters import AdamEpsilon, ClipAlwaysOn, Momentum, WeightDecayDominates
from retrograd.findings.detectors.initialisation import BadInit, SymmetricInit
from retrograd.findings.detectors.learning_rate import LearningRateTooHigh, LearningRateTooLow, NotUpdated
from retrograd.findings.detectors.loss import Diverged, LossFlat, LossNoisy, LossSpike
from retrograd.findings.detectors.precision import OverflowHeadroom, ScalerChurn, Underflow, UpdateLost
from retrograd.findings.detectors.ranks import RanksDisagree
from retrograd.findings.detectors.units import AttentionCollapse, DeadUnits, EmbeddingUnused, Saturated

DETECTORS: tuple[type[Detector], ...] = (
    BadInit, SymmetricInit, Exploding, Vanishing, LearningRateTooHigh, LearningRateTooLow, NotUpdated,
    DeadUnits, Saturated, AttentionCollapse, EmbeddingUnused, WeightDecayDominates, AdamEpsilon, Momentum, ClipAlwaysOn,
    Underflow, UpdateLost, OverflowHeadroom, ScalerChurn, BatchNorm, RanksDisagree,
    LossSpike, Diverged, LossFlat, LossNoisy,
)  # fmt: skip
"""All of them, in the order in which they are asked."""
