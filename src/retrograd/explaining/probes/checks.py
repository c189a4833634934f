"""``rg.check_batch`` and ``rg.check_causal``: what users call."""

from __future__ import annotations

from typing import Any

from torch import nn

from retrograd.core.guesses import names_arguments
from retrograd.explaining.probes.batch import read_batch
from retrograd.explaining.probes.mixing import MixingProbe, PositionProbe, SampleProbe
from retrograd.explaining.probes.result import Mixing
from retrograd.explaining.probes.trial import Trial


@names_arguments
def check_batch(model: nn.Module, batch: Any, *, dim: int = 0) -> Mixing:
    """Check that what a model returns for a sample does not depend on other samples of the batch.

    A copy of the model runs a few times, with other samples in some places, and the same random numbers. The first
    operation that makes one number of several samples is named. Batch norm in training is told apart::

        assert rg.check_batch(model, images)

    The model stays as it is: parameters, buffers, gradients, hooks, modes and the random state.

    Args:
        model: in the mode in which it is to be checked.
        batch: what it is called with: a tensor, a tuple or list of arguments, or a mapping of named ones. What
            ``forward`` has no place for is left out, such as the targets of a data loader. The samples must differ.
        dim: the dimension along which the samples stand.

    Returns:
        The answer: True where samples do not mix, or by batch norm alone.

    Raises:
        ProbeError: the model cannot be copied, returns nothing that has a place for each sample, or returns something
            else when it is called again.
    """
    return _ask(SampleProbe, model, batch, dim)


@names_arguments
def check_causal(model: nn.Module, tokens: Any, *, dim: int = 1) -> Mixing:
    """Check that what a model returns for a position does not depend on later positions.

    As :func:`check_batch`, with other tokens at some positions. Tried are the last position, the second, and two in
    the middle. Where a mask was computed and not used, that is the operation that is named.

    Args:
        model: in the mode in which it is to be checked.
        tokens: what it is called with, as for :func:`check_batch`: ids of shape [samples, positions], or vectors.
        dim: the dimension along which the positions stand.

    Returns:
        The answer: True where no position depends on a later one, or by batch norm alone.

    Raises:
        ProbeError: as for :func:`check_batch`.
    """
    return _ask(PositionProbe, model, tokens, dim)


def _ask(kind: type[MixingProbe], model: nn.Module, batch: Any, dim: int) -> Mixing:
    trial = Trial(model)
    return kind(trial, read_batch(trial.model, batch), dim).ask()
