"""``rg.describe``: what a run did, from its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from retrograd.core.guesses import names_arguments
from retrograd.core.runs.findings import Explained
from retrograd.core.runs.reader import Given
from retrograd.explaining.card.card import Card, CardEntry
from retrograd.explaining.card.inputs import describe_inputs
from retrograd.explaining.card.losses import describe_losses, describe_targets
from retrograd.explaining.card.optimizers import describe_optimizers
from retrograd.explaining.card.parameters import describe_changes, describe_loads, describe_parameters
from retrograd.explaining.card.steps import describe_cycle, describe_modes
from retrograd.explaining.card.surroundings import describe_omissions, describe_precision, describe_ranks
from retrograd.explaining.findings.detectors.missing_gradients import tell_reasons
from retrograd.explaining.findings.explain import explain_record, make_record
from retrograd.explaining.findings.record import Record

TOPICS: tuple[Callable[[Record], Iterator[CardEntry]], ...] = (
    describe_parameters, describe_losses, describe_optimizers, describe_cycle, describe_inputs, describe_targets,
    describe_modes, describe_loads, describe_changes, describe_precision, describe_ranks, describe_omissions,
)  # fmt: skip
"""What is said of a record, the most telling first."""


@names_arguments
def describe(what: Given) -> Card:
    """Describe what a run did, as far as its record tells: what was trained, on what, by which loss, and how.

    Args:
        what: a run, its folder, a history, or a recording, which may still go on.

    Returns:
        A card, which prints itself in at most twelve lines; ``entries`` has all, with the numbers behind it.

    Raises:
        NotARunError, DamagedRunError: the folder cannot be read.
        ExplainError: it is nothing that was recorded.
    """
    return describe_record(make_record(what))


def explain_for_page(what: Given, names: Sequence[str]) -> Explained:
    """Explain a run, why parameters never got a gradient, and what the run did.

    Args:
        what: as for :func:`describe`.
        names: parameters that got no gradient.
    """
    record = make_record(what)
    lines = [asdict(line) for line in describe_record(record).lines]
    return Explained(explain_record(record), tell_reasons(record, names), lines)


def describe_record(record: Record) -> Card:
    """The card of a record."""
    return Card(tuple(entry for find in TOPICS for entry in _try(find, record)))


def _try(find: Callable[[Record], Iterator[CardEntry]], record: Record) -> list[CardEntry]:
    """What is said of a topic; a fault of ours must not hide what is known of the others."""
    try:
        return list(find(record))
    except Exception as error:
        topic = find.__name__.partition("_")[2]
        return [CardEntry(topic=topic, text=f"not described, because it failed: {type(error).__name__}: {error}")]
