"""The detectors: one fault, or one family, a file, with a table of words beside it."""

from importlib import import_module

from retrograd.explaining.findings.detector import Detector
from retrograd.explaining.findings.detectors.nonfinite import (
    KinksInBackward,
    NanBackward,
    NanForward,
    NanInput,
    NanUpdate,
)

_FAMILIES = """
    accumulation architecture axes batch_norm broken_graphs call_order clipping failed gradient_flow graphs
    hyper_parameters initialisation inputs learning_rate loss loss_chain loss_sense missing_gradients modes optimizers
    precision probes ranks refused schedule shapes spread targets terms units weights
"""

_ORDER = """
    nan-input nan-forward nan-backward nan-update failed no-graph freed-graph overwritten recomputed-otherwise
    inference-tensor unused-in-ddp second-derivative layers-in-a-list missing-gradient not-optimized missing-zero-grad
    term-without-effect straight-through-loss td-target-gradient summed-before-mask summed-beside-mean
    log-prob-as-entropy own-backward future-seen samples-mix zero-grad-misplaced optimizer-never-steps
    backward-never-called step-before-backward step-too-seldom double-backward accumulation-not-divided
    clip-after-step clip-before-backward clip-before-unscale clip-other-parameters lr-zero scheduler-per-step
    scheduler-before-step lr-jump optimizer-made-anew optimizer-before-change keys-not-loaded snapshot-not-copied
    averages-not-put-back resume-incomplete bit-flipped softmax-before-cross-entropy activation-on-logits
    sigmoid-before-bce-with-logits nll-on-probabilities bce-on-logits dropout-misplaced broadcast-loss wrong-dim
    reshape-mixes-batch relu-on-output loss-wrong-sign loss-reduction-sum input-unscaled input-drifts
    targets-shifted-twice targets-not-shifted padding-in-loss sorted-labels mask-inverted mask-hides-nothing
    output-ignores-input representation-collapse evaluation-inputs graph-grows graph-leaks weights-untied shared-weights
    missing-nonlinearity eval-mode-in-training train-mode-in-evaluation dropout-in-evaluation bad-init symmetric-init
    exploding vanishing learning-rate-too-high learning-rate-too-low not-updated hooks-scale dead-units saturated
    attention-collapse embedding-unused weight-decay-dominates adam-epsilon momentum clip-always-on underflow
    bf16-update-lost scaler-churn batch-norm ranks-disagree loss-spike diverged loss-flat kinks zero-gradient
    positions-shared result-dropped
"""

_FOUND: dict[str, Detector] = {
    **{make.slug: make() for make in (NanInput, NanForward, NanBackward, NanUpdate, KinksInBackward)},
    **{each.slug: each for file in _FAMILIES.split() for each in import_module(f"{__name__}.{file}").family.entries},
}

DETECTORS: tuple[Detector, ...] = tuple(map(_FOUND.__getitem__, _ORDER.split()))
"""All detectors, in the order in which they are asked."""
