"""What it means that two runs part at a site, where no other difference tells why."""

from __future__ import annotations

from dataclasses import dataclass

from retrograd.comparing.differences import knows_inputs, list_names
from retrograd.comparing.divergence import Divergence
from retrograd.findings.finding import Evidence, Finding
from retrograd.findings.record import Record
from retrograd.sites.site import Site, parse_leniently

_DRAWING = ("dropout", "bernoulli", "rand", "multinomial", "normal", "rrelu", "uniform", "exponential", "poisson")


@dataclass(frozen=True, slots=True)
class Predecessors:
    """What stands before the place at which two runs part.

    Attributes:
        no_forward: nothing was recorded before it in its forward.
        no_gradient: no gradient was recorded before it in its pass.
        knows_weights: the sizes that parameters had before the update of this step were recorded.
        other_weights: those parameters of which they differ.
    """

    no_forward: bool
    no_gradient: bool
    knows_weights: bool
    other_weights: tuple[str, ...]


def tell_parting(parting: Divergence, a: Record, b: Record, before: Predecessors, *, is_explained: bool) -> Finding:
    """A finding about the place alone.

    Args:
        parting: where.
        a: the first record.
        b: the second.
        before: what stands before it.
        is_explained: a difference is known that explains it: then it is said what follows, and not why.
    """
    site = parse_leniently(parting.site)
    if is_explained and before.no_forward and site.quantity == "value":
        slug, message = "forward", f"The first output, {site}, differs at step {parting.step}."
    else:
        slug, message = _explain(site, parting.step, a, before, knows_inputs=knows_inputs(a, b))
    return Finding(
        detector=slug,
        severity="warning",
        message=message,
        site=parting.site,
        step=parting.step,
        line=_line_of(site, a),
        evidence=(
            Evidence("distance, relative to its size", parting.distance, f"> {parting.limit:.2g} by noise"),
            Evidence("root mean square in A", parting.a),
            Evidence("root mean square in B", parting.b),
        ),
        refute="a repeated run of the same program that is as far apart: give it as noise",
    )


def _explain(site: Site, step: int, a: Record, before: Predecessors, *, knows_inputs: bool) -> tuple[str, str]:
    if site.quantity == "update" and str(site.value) in before.other_weights:
        return "parameters", f"Something has changed {site.value} before it was updated at step {step}."
    if site.quantity == "update":
        return "update", f"The update of {site.value} differs at step {step}, though its gradient agrees."
    if site.quantity == "grad":
        return _explain_gradient(site, step, before.no_gradient)
    if step and before.other_weights:
        names = list_names(before.other_weights)
        return "parameters", f"Before step {step} something has changed {names}, though all updates agree."
    if before.no_forward and not knows_inputs:
        if before.knows_weights:
            return (
                "inputs",
                f"What the model is called with differs from step {step} on: {site} does, parameters agree.",
            )
        return "inputs-or-parameters", f"The first output, {site}, differs at step {step}: its inputs, or parameters."
    if _draws(site, a):
        return "random-state", f"{site.path} draws other random numbers at step {step}; what it is given agrees."
    if before.no_forward:
        agrees = (
            "its inputs and parameters agree" if before.knows_weights and not before.other_weights else "inputs agree"
        )
        return "forward", f"The first output, {site}, differs at step {step}, though {agrees}."
    kind = a.type_of(site.path)
    named = f"{site.path} ({kind})" if kind else site.path
    return "forward", f"The forward of {named} differs at step {step}, though all that ran before it agrees."


def _explain_gradient(site: Site, step: int, is_first: bool) -> tuple[str, str]:
    if is_first:
        message = f"What comes back from the loss to {site.value} differs at step {step}, though all outputs agree:"
        return "loss", f"{message} another loss, or other targets."
    if site.kind == "parameter":
        message = f"The gradient of {site.value} differs at step {step}, though those at outputs behind it agree."
    else:
        message = f"The gradient at {site.value} differs at step {step}, though the forward and all behind it agree."
    return "backward", message


def _draws(site: Site, record: Record) -> bool:
    names = [each.name for fact in record.operations for each in fact.operations() if each.module == site.path]
    return "Dropout" in record.type_of(site.path) or any(name.startswith(_DRAWING) for name in names)


def _line_of(site: Site, record: Record) -> str:
    lines = (each.line for fact in record.operations for each in fact.operations() if each.module == site.path)
    return next(lines, "")
