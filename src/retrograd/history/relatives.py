"""What belongs to a gradient: the value that it is of, and what went into that very call of the module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from retrograd.errors import NoSuchSiteError, NothingKeptError
from retrograd.history.kept import Kept
from retrograd.history.names import SiteNames
from retrograd.history.series import Series
from retrograd.sites.site import name_like, parse_leniently


class RecordedRelatives:
    """Finds it in one record.

    Args:
        names: its sites.
        find_series: the series of a name.
        find_tensors: what was kept of a site, by its name as it is written.
        explain: why nothing was recorded of a name, if that is known.
    """

    def __init__(
        self,
        names: SiteNames,
        find_series: Callable[[str], Series],
        find_tensors: Callable[[str], list[Kept]],
        explain: Callable[[str], str],
    ) -> None:
        self._explain = explain
        self._names = names
        self._find_series = find_series
        self._find_tensors = find_tensors

    def list_tensors(self, series: Series) -> Sequence[Kept]:
        """What was kept of its calls, oldest first."""
        codes = self._names.find(series.site)
        of_calls = [self._find_tensors(self._names.write(code)) for code, call in codes.items() if series.means(call)]
        if len(of_calls) == 1:
            return of_calls[0]
        together = [kept for tensors in of_calls for kept in tensors]
        return sorted(together, key=lambda kept: (kept.step, kept.micro, kept.backward))

    def explain_none_kept(self, series: Series) -> NothingKeptError:
        """Whether it was not asked for, or did not come."""
        why = self._explain(series.site)
        if not why and parse_leniently(series.site).quantity == "grad":
            why = "a gradient comes only where the tensor requires grad and a backward pass reaches it."
        return NothingKeptError(
            f"No tensor of {series.site!r} was kept.",
            repair=f"ask for it, rg.record(model, tensors={series.site!r}), or for a site of which something comes.",
            reason=why,
        )

    def find_value(self, series: Series) -> Series:
        """The value that it is the gradient or the update of."""
        name = name_like(parse_leniently(series.site).value, series.site)
        if name not in self._names:
            raise _miss(f"The value of {series.site!r}", name, series.site)
        return self._find_series(name).paired_with(series)

    def find_inputs(self, series: Series) -> dict[str, Series]:
        """What the module was called with, by the names of arguments."""
        site = parse_leniently(series.site)
        if site.kind in ("parameter", "watched"):
            what = "a parameter" if site.kind == "parameter" else "a tensor that is watched by hand"
            raise NoSuchSiteError(
                f"{series.site!r} is of {what}, and belongs to no input.",
                repair=f"ask for the value that it is of, history[{series.site!r}].value, or for the input of a "
                "module's output: history['fc:output.grad'].input.",
                reason="an input belongs to one call of a module.",
            )
        arguments = [replace(each, call=site.call) for each in self._names.list_arguments(site.path)]
        names = {".".join(each.keys[1:]): name_like(each, series.site) for each in arguments}
        found = {
            argument: self._find_series(name).paired_with(series)
            for argument, name in names.items()
            if name in self._names
        }
        if not found:
            raise _miss(f"The input of {series.site!r}", f"{site.printed_path}:inputs", series.site)
        return found


def _miss(what: str, pattern: str, asked: str) -> NoSuchSiteError:
    return NoSuchSiteError(
        f"{what} was not recorded: there is no {pattern!r}.",
        repair=f"add it: rg.record(model, sites=[{asked!r}, {pattern!r}]).",
    )
