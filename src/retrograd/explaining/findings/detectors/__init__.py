"""The detectors: one fault, or one family, a file."""

from retrograd.explaining.findings.detector import Detector
from retrograd.explaining.findings.detectors.accumulation import (
    AccumulationNotDivided,
    DoubleBackward,
    MisplacedZeroGrad,
    MissingZeroGrad,
)
from retrograd.explaining.findings.detectors.architecture import MissingNonlinearity, SharedByAccident, WeightsUntied
from retrograd.explaining.findings.detectors.batch_norm import BatchNorm
from retrograd.explaining.findings.detectors.broken_graphs import FreedGraph, NoGraph, OverwrittenTensor
from retrograd.explaining.findings.detectors.call_order import (
    BackwardNeverCalled,
    NeverSteps,
    StepBeforeBackward,
    StepTooSeldom,
)
from retrograd.explaining.findings.detectors.clipping import (
    ClipAfterStep,
    ClipAlwaysOn,
    ClipBeforeBackward,
    ClipBeforeUnscale,
    ClipOtherParameters,
)
from retrograd.explaining.findings.detectors.failed import Failed
from retrograd.explaining.findings.detectors.gradient_flow import Exploding, HooksScale, Vanishing
from retrograd.explaining.findings.detectors.graphs import GraphGrows, GraphLeaks
from retrograd.explaining.findings.detectors.hyper_parameters import AdamEpsilon, Momentum, WeightDecayDominates
from retrograd.explaining.findings.detectors.initialisation import BadInit, SymmetricInit
from retrograd.explaining.findings.detectors.inputs import ConstantInput, UnscaledInput
from retrograd.explaining.findings.detectors.learning_rate import LearningRateTooHigh, LearningRateTooLow, NotUpdated
from retrograd.explaining.findings.detectors.loss import Diverged, LossFlat, LossNoisy, LossSpike
from retrograd.explaining.findings.detectors.loss_chain import (
    ActivationOnLogits,
    BceOnLogits,
    DropoutMisplaced,
    NllOnProbabilities,
    SigmoidBeforeLogitsLoss,
    SoftmaxBeforeCrossEntropy,
)
from retrograd.explaining.findings.detectors.loss_sense import BoundedOutput, SummedLoss, WrongSign
from retrograd.explaining.findings.detectors.missing_gradients import LayersInAList, MissingGradient, NotOptimized
from retrograd.explaining.findings.detectors.modes import EvalModeInTraining, TrainModeInEvaluation
from retrograd.explaining.findings.detectors.nonfinite import (
    KinksInBackward,
    NanBackward,
    NanForward,
    NanInput,
    NanUpdate,
)
from retrograd.explaining.findings.detectors.optimizers import BeforeChange, MadeAnew
from retrograd.explaining.findings.detectors.precision import OverflowHeadroom, ScalerChurn, Underflow, UpdateLost
from retrograd.explaining.findings.detectors.ranks import RanksDisagree
from retrograd.explaining.findings.detectors.refused import InferenceTensor, RecomputedOtherwise, UnusedInDDP
from retrograd.explaining.findings.detectors.schedule import RateIsZero, RateJump, SchedulerBeforeStep, SchedulerPerStep
from retrograd.explaining.findings.detectors.second_derivative import LostSecondDerivative
from retrograd.explaining.findings.detectors.shapes import BroadcastLoss, ReshapeMixes, WrongDimension
from retrograd.explaining.findings.detectors.units import AttentionCollapse, DeadUnits, EmbeddingUnused, Saturated

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
