"""A tensor from elsewhere: of an earlier call, of another site, or of a recording."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from retrograd.core.amounts import count_of
from retrograd.core.errors import RuleError
from retrograd.core.history.kept import Kept
from retrograd.core.history.series import Series
from retrograd.core.notices import warn
from retrograd.core.sites.site import parse_site
from retrograd.rewriting.rules.checks import check_count, need_dense, need_shape
from retrograd.rewriting.rules.occasions import load
from retrograd.rewriting.rules.rule import Rule, SiteState

Source = int | str | Series | Sequence[Tensor | Kept]


class Substitute(Rule):
    """Put a tensor from elsewhere in place of the one that is here.

        Substitute(1)                                 what was here one call ago; n for n calls
        Substitute("a:output")                        what was last seen at another site
        Substitute(run.history["fc:output.grad"])     what a recording kept, at the same step
        Substitute(tensors)                           the first tensor at the first call, and so on

    For another site use one instance on both: there it remembers and changes nothing.

    Of a recording, the k-th call of a step gets what was k-th in that step; where one value alone was recorded of it,
    each call gets that one, in training and in eval mode. Of a module that was recorded at several
    calls, each call gets what was recorded of it. Values in eval mode are counted apart, and get what was recorded
    without a backward pass. Where nothing was recorded so, they get what
    was recorded in training, unless the module has been called in training mode here, too. A tensor is read when its
    step comes, from the run folder if it lies there.

    A recording or a list that has nothing for a call leaves it alone, with a warning the first time.

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
        self._kept: list[Kept] = []
        self._in_order: list[Tensor] = []
        self._has_warned = False
        if isinstance(source, Series):
            self._kept = list(source.tensors)
        elif isinstance(source, Sequence) and not isinstance(source, str):
            self._kept = [each for each in source if isinstance(each, Kept)]
            self._in_order = [each.detach() for each in source if isinstance(each, Tensor)]
        trained = _sort_by_step(each for each in self._kept if each.phase == "train")
        evaluated = _sort_by_step(each for each in self._kept if each.phase not in ("train", "failed"))
        self._trained, self._evaluated = trained or evaluated, evaluated
        self._by_call = len({kept.call for kept in self._kept}) > 1
        if not (self._past or self._site or self._trained or self._in_order):
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
            if calls < len(self._in_order):
                return self._in_order[calls]
            self._warn(state, f"The list has {count_of(len(self._in_order), 'tensor')}.")
            return None
        return self._find_recorded(state)

    def _find_recorded(self, state: SiteState) -> Tensor | None:
        trains = state.training or parse_site(state.site).quantity == "grad"
        if state.training:
            state.put("trains", True)
        by_step = self._trained if trains or not self._evaluated else self._evaluated
        if not (trains or self._evaluated) and state.get("trains", False):
            self._warn(state, "It is called in eval mode, and what was recorded is of training alone.")
            return None
        call = state.call if self._by_call else 0
        key = f"{'' if trains else 'eval/'}{call}"
        number = state.get(f"seen/{key}", 0) if state.get(f"step/{key}", -1) == state.step else 0
        state.put(f"step/{key}", state.step)
        state.put(f"seen/{key}", number + 1)
        kept = [each for each in by_step.get(state.step, []) if call in (0, each.call)]
        is_value = parse_site(state.site).quantity != "grad"
        if len(kept) == 1 and is_value:
            return load(kept[0])
        if number < len(kept):
            return load(kept[number])
        if kept:
            self._warn(state, f"This is call {number + 1} of the kind in this step, and the recording has {len(kept)}.")
            return None
        steps = f"steps {min(by_step)} to {max(by_step)}" if len(by_step) > 1 else f"step {min(by_step)}"
        self._warn(state, f"The recording has tensors of {steps}, none of them for this step and call.")
        return None

    def _warn(self, state: SiteState, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"Substitute has nothing to put at {state.site} in step {state.step}, and leaves the value as it is. "
                f"{what} To put one tensor at every call, give a function: lambda value, state: tensor."
            )

    def _find_past(self, value: Tensor, state: SiteState) -> Tensor | None:
        last = state.last("tensor", self._past)
        found = last[0] if len(last) == self._past else None
        last.add(value, copy=True)  # the gradient of a parameter is added to by later passes
        return found


def _sort_by_step(tensors: Iterable[Kept]) -> dict[int, list[Kept]]:
    found: dict[int, list[Kept]] = {}
    for kept in tensors:
        found.setdefault(kept.step, []).append(kept)
    return found
