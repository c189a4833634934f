"""What a rule did, tensor by tensor: as a table, and as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("micro", pa.int32()),
        ("backward", pa.int16()),
        ("rank", pa.int32()),
        ("site", pa.string()),
        ("before", pa.float64()),
        ("after", pa.float64()),
        ("change", pa.float64()),
        ("acted", pa.bool_()),
    ]
)


class Outcome(NamedTuple):
    """What became of one tensor."""

    step: int
    micro: int
    backward: int
    rank: int
    site: str
    before: float
    after: float
    change: float
    acted: bool


class RuleSimulation:
    """What a rule would have done; ``print`` it for a line a site, the largest change first.

    Attributes:
        rule: the rule as printed.
        table: a row a tensor, as they came: ``step``, ``micro``, ``backward``, ``rank`` and ``site`` as in a record;
            ``before`` and ``after``, norms of the tensor; ``change``, ‖new − old‖ / ‖old‖; ``acted``, whether any
            element changed.
    """

    def __init__(self, rule: str, outcomes: Iterable[Outcome]) -> None:
        self.rule = rule
        columns = list(zip(*outcomes, strict=True)) or [()] * len(SCHEMA)
        self.table: pa.Table = pa.table(
            [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], SCHEMA
        )

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Steps at which the rule acted anywhere, rising: int64."""
        return np.unique(self._column("step")[self._column("acted")])

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        acted = int(self._column("acted").sum())
        return f"Simulation({self.rule}: acted on {acted:,} of {len(self):,} tensors, at {len(self.steps):,} steps)"

    def __str__(self) -> str:
        steps = self._column("step")
        span = f", steps {steps.min():,} to {steps.max():,}" if len(steps) else ""
        names = list(dict.fromkeys(self.table["site"].to_pylist()))
        lines = [(name, *self._describe(name)) for name in names]
        acted = sorted((line for line in lines if line[2]), key=lambda line: line[1:3], reverse=True)
        width = max((len(name) for name, *_ in acted), default=0)
        text = [self.rule + span]
        text += [f"  {name:<{width}}  {words}" for name, _, _, words in acted]
        if len(acted) < len(names):
            text.append(f"  {len(names) - len(acted):,} left alone" if acted else "  nothing would have changed")
        return "\n".join(text)

    def _describe(self, name: str) -> tuple[float, int, str]:
        """Of a site the largest change, how often the rule acted, and both in words."""
        here = self._column("site") == name
        acted = np.flatnonzero(here & self._column("acted"))
        if not len(acted):
            return 0.0, 0, ""
        change = np.nan_to_num(self._column("change")[acted], nan=np.inf, posinf=np.inf)
        worst = acted[int(change.argmax())]
        before, after, step = (self._column(column)[worst] for column in ("before", "after", "step"))
        share = f"acted {len(acted):,} of {int(here.sum()):,} times"
        words = f"{share}; most at step {step:,}: norm {before:.3g} to {after:.3g}"
        return float(change.max()), len(acted), words

    def _column(self, name: str) -> npt.NDArray[np.generic]:
        return np.asarray(self.table[name].to_numpy())
