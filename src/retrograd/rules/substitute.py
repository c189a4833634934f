"""A tensor from elsewhere: of an earlier call, of another site, or of a recording."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from retrograd.errors import RuleError
from retrograd.history.kept import Kept
from retrograd.history.series import Series
from retrograd.rules.checks import check_count, need_dense, need_shape
from retrograd.rules.occasions import load
from retrograd.rules.rule import Rule, SiteState
from retrograd.sites.site import parse_site

Source = int | str | Series | Sequence[Tensor | Kept]


class Substitute(Rule):
    """Put a tensor from elsewhere in place of the one that is here. Where there is none for a call, leave it.

        Substitute(1)                                 what was here one call ago; n for n calls
        Substitute("a:output")                        what was last seen at another site
        Substitute(run.history["fc:output.grad"])     what a recording kept, at the same step
        Substitute(tensors)                           the first tensor at the first call, and so on

    For another site use one instance on both: there it remembers and changes nothing.

    Of a recording the training phase counts, and the k-th call of a step gets what was k-th in that step. Of a module
    that was recorded at several calls, each call gets what was recorded of it. Values of forwards in eval mode are left
    alone and not counted. It is read when its step comes, from the run folder if it lies there.

    What is put here is a copy, converted to the type and device of what was here; no gradient flows to where it is
    from.

    Args:
        source: as above.

    Raises:
        RuleError: for anything else, and for a recording that kept nothing.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        if isinstance(source, int):
            check_count(self, "source", source)
        elif not isinstance(source, (str, Series, Sequence)):
            raise RuleError(
                f"Substitute: {source!r} is not a source of tensors.",
                repair="give a number of calls, a site, the series of a recording, or a list of tensors.",
            )
        self.source = source
        self._past = source if isinstance(source, int) else 0
        self._site = source if isinstance(source, str) else None
        self._by_step: dict[int, list[Kept]] = {}
        self._in_order: list[Tensor] = []
        self._by_call = False
        if isinstance(source, Series):
            self._by_step = _sort_by_step(source.tensors)
        elif isinstance(source, Sequence) and not isinstance(source, str):
            self._by_step = _sort_by_step(each for each in source if isinstance(each, Kept))
            self._in_order = [each.detach() for each in source if isinstance(each, Tensor)]
        self._by_call = len({kept.call for several in self._by_step.values() for kept in several}) > 1
        if not (self._past or self._site or self._by_step or self._in_order):
            raise RuleError(
                f"Substitute: there are no tensors in {source!r}.",
                repair="record them: rg.record(model, tensors='fc:output.grad').",
            )

    def __call__(self, value: Tensor, state: SiteState) -> Tensor | None:
        need_dense(self, value)
        if state.site == self._site:
            state.last("tensor", 1).add(value, copy=True)
            return None
        found = self._find(value, state)
        if found is None:
            return None
        need_shape(self, value, found.shape)
        return found.to(device=value.device, dtype=value.dtype, copy=True)

    def _find(self, value: Tensor, state: SiteState) -> Tensor | None:
        if self._site is not None:
            last = self.state_at(self._site).last("tensor", 1)
            return last[-1] if len(last) else None
        if self._past:
            return self._find_past(value, state)
        if self._in_order:
            calls: int = state.get("calls", 0)
            state.put("calls", calls + 1)
            return self._in_order[calls] if calls < len(self._in_order) else None
        return self._find_recorded(state)

    def _find_recorded(self, state: SiteState) -> Tensor | None:
        if not (state.training or parse_site(state.site).quantity == "grad"):
            return None
        call = state.call if self._by_call else 0
        step, seen = state.get(f"step/{call}", -1), state.get(f"seen/{call}", 0)
        number = seen if step == state.step else 0
        state.put(f"step/{call}", state.step)
        state.put(f"seen/{call}", number + 1)
        kept = [each for each in self._by_step.get(state.step, []) if call in (0, each.call)]
        return load(kept[number]) if number < len(kept) else None

    def _find_past(self, value: Tensor, state: SiteState) -> Tensor | None:
        last = state.last("tensor", self._past)
        found = last[0] if len(last) == self._past else None
        last.add(value, copy=True)  # the gradient of a parameter is added to by later passes
        return found


def _sort_by_step(tensors: Iterable[Kept]) -> dict[int, list[Kept]]:
    found: dict[int, list[Kept]] = {}
    for kept in tensors:
        if kept.phase == "train":
            found.setdefault(kept.step, []).append(kept)
    return found
