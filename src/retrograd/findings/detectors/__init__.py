"""The detectors: one fault, or one family, a file."""

from retrograd.findings.detector import Detector
from retrograd.findings.detectors.accumulation import (
    AccumulationNotDivided,
    DoubleBackward,
    MisplacedZeroGrad,
    MissingZeroGrad,
)
from retrograd.findings.detectors.architecture import MissingNonlinearity, SharedByAccident, WeightsUntied
from retrograd.findings.detectors.batch_norm import BatchNorm
from retrograd.findings.detectors.broken_graphs import FreedGraph, NoGraph, OverwrittenTensor
from retrograd.findings.detectors.call_order import BackwardNeverCalled, NeverSteps, StepBeforeBackward, StepTooSeldom
from retrograd.findings.detectors.clipping import (
    ClipAfterStep,
    ClipAlwaysOn,
    ClipBeforeBackward,
    ClipBeforeUnscale,
    ClipOtherParameters,
)
from retrograd.findings.detectors.failed import Failed
from retrograd.findings.detectors.gradient_flow import Exploding, HooksScale, Vanishing
from retrograd.findings.detectors.graphs import GraphGrows, GraphLeaks
from retrograd.findings.detectors.hyper_parameters import AdamEpsilon, Momentum, WeightDecayDominates
from retrograd.findings.detectors.initialisation import BadInit, SymmetricInit
from retrograd.findings.detectors.inputs import ConstantInput, UnscaledInput
from retrograd.findings.detectors.learning_rate import LearningRateTooHigh, LearningRateTooLow, NotUpdated
from retrograd.findings.detectors.loss import Diverged, LossFlat, LossNoisy, LossSpike
from retrograd.findings.detectors.loss_chain import (
    ActivationOnLogits,
    BceOnLogits,
    DropoutMisplaced,
    NllOnProbabilities,
    SigmoidBeforeLogitsLoss,
    SoftmaxBeforeCrossEntropy,
)
from retrograd.findings.detectors.loss_sense import BoundedOutput, SummedLoss, WrongSign
from retrograd.findings.detectors.missing_gradients import LayersInAList, MissingGradient, NotOptimized
from retrograd.findings.detectors.modes import EvalModeInTraining, TrainModeInEvaluation
from retrograd.findings.detectors.nonfinite import KinksInBackward, NanBackward, NanForward, NanInput, NanUpdate
from retrograd.findings.detectors.optimizers import BeforeChange, MadeAnew
from retrograd.findings.detectors.precision import OverflowHeadroom, ScalerChurn, Underflow, UpdateLost
from retrograd.findings.detectors.ranks import RanksDisagree
from retrograd.findings.detectors.refused import InferenceTensor, RecomputedOtherwise, UnusedInDDP
from retrograd.findings.detectors.schedule import RateIsZero, RateJump, SchedulerBeforeStep, SchedulerPerStep
from retrograd.findings.detectors.second_derivative import LostSecondDerivative
from retrograd.findings.detectors.shapes import BroadcastLoss, ReshapeMixes, WrongDimension
from retrograd.findings.detectors.units import AttentionCollapse, DeadUnits, EmbeddingUnused, Saturated

DETECTORS: tuple[type[Detector], ...] = (
    NanInput, NanForward, NanBackward, NanUpdate,
    Failed, NoGraph, FreedGraph, OverwrittenTensor,
    RecomputedOtherwise, InferenceTensor, UnusedInDDP, LostSecondDerivative,
    LayersInAList, MissingGradient, NotOptimized,
    MissingZeroGrad, MisplacedZeroGrad, NeverSteps, BackwardNeverCalled, StepBeforeBackward, StepTooSeldom,
    DoubleBackward, AccumulationNotDivided, ClipAfterStep, ClipBeforeBackward, ClipBeforeUnscale, ClipOtherParameters,
    RateIsZero,
    SchedulerPerStep, SchedulerBeforeStep, RateJump, MadeAnew, BeforeChange, SoftmaxBeforeCrossEntropy,
    ActivationOnLogits,
    SigmoidBeforeLogitsLoss, NllOnProbabilities, BceOnLogits, DropoutMisplaced, BroadcastLoss, WrongDimension,
    ReshapeMixes, BoundedOutput, WrongSign, SummedLoss, UnscaledInput, ConstantInput, GraphGrows, GraphLeaks,
    WeightsUntied, SharedByAccident, MissingNonlinearity, EvalModeInTraining, TrainModeInEvaluation,
    BadInit, SymmetricInit, Exploding, Vanishing, LearningRateTooHigh, LearningRateTooLow, NotUpdated,
    HooksScale,
    DeadUnits, Saturated, AttentionCollapse, EmbeddingUnused, WeightDecayDominates, AdamEpsilon, Momentum, ClipAlwaysOn,
    Underflow, UpdateLost, OverflowHeadroom, ScalerChurn, BatchNorm, RanksDisagree,
    LossSpike, Diverged, LossFlat, LossNoisy,
    KinksInBackward,
)  # fmt: skip
"""All detectors, in the order in which they are asked."""
