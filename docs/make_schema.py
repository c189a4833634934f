# ruff: noqa: INP001  # a folder of pages, not a package
"""Makes ``run_folder.md`` from the code: ``python docs/make_schema.py``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from retrograd.core.history.fact import Fact
from retrograd.core.history.facts import FACTS
from retrograd.core.history.table import EVENT_COLUMNS, STATISTICS_COLUMNS, Column
from retrograd.core.runs.layout import FORMAT, PLACES
from retrograd.core.runs.shards import NOTES

_PAGE = """<!-- Made by docs/make_schema.py; change the code, not this page. -->

# The run folder

A run folder is plain data: Parquet, safetensors and JSON. Any tool reads it, with or without retrograd, also
while training goes on. This page describes format {format}.

## Files

{places}

- Every file appears whole, by renaming. A name that begins with `.tmp-` is a file that is being written, or was
  when its process was killed; pass over it. None lies in a folder whose files are read together (`statistics`,
  `merged`, `events`, `tensors`), and none has an extension, so that no glob such as `*.parquet` finds one.
- The two numbers of a part are the flushes that it holds, first and last. Small neighbours are merged into larger
  parts. If you find a part whose numbers lie inside another's, pass over it: its process was killed between
  writing the merged one and removing it. While a process writes, a query of all parts may come at that moment, once in
  32 flushes: then it counts rows twice, or fails since a file is gone. Ask again; `rg.open_run` does neither.
- Links are read, but nothing below the run folder is written or removed through one: `retrograd compact`, `--resume`
  and whatever else writes refuses it.
- A process writes every two seconds. Killed at any moment, it loses the rows that it has recorded since, and kept
  tensors of up to twice that time; a power cut may take more, for files are not forced to the disk one by one.
- Rows of a step are handed to the writer when the next forward begins, or at a flush: where a process is killed while
  it waits behind `optimizer.step()`, as for data, the rows of that step are lost, however long ago it was.
- The last step of a process that was killed may lack rows: those of later micro-batches, or its updates. A step is
  whole where the process has rows of a later one, or ended by itself (`status` is not `running`).
- There is no column for the rank: the folder tells it. What ranks hold the same of is to be counted once: see
  [`placements.json`](#placementsjson).

## Statistics

A row is one site at one moment: what one slab row held when it was drained. To merge rows, over micro-batches or
ranks or sites, add up `calls`, the counts, `sum`, `abs_sum` and `reference`, take the extremes of `min` and `max`,
and merge `m2` as m2ₐ + m2ᵦ + (meanₐ − meanᵦ)² nₐ nᵦ / (nₐ + nᵦ), where n = count − nan − pos_inf − neg_inf.

Counts and extremes are exact. Sums are rounded about as float32 is: `rms` and `std` are right to some 1e-7 of
themselves, the mean to some 1e-7 of the mean of |x|, so one that cancels has fewer digits. Elements of float64 whose
squares overflow, beyond some 1e154, have an infinite `rms` and `std`.

{statistics}

Gradients are stored with the loss scale divided out: exactly when it is a power of two, as PyTorch's scaler makes
it; otherwise to rounding, and with the histogram moved by the nearest whole exponent.

```sql
-- DuckDB
SELECT step, rms FROM 'RUN/rank00000/statistics/*.parquet' WHERE site = 'head:output.grad' ORDER BY step;
```

<!-- A run for the blocks below:
```python
import torch
import retrograd as rg

head = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
with rg.record({{"head": head}}, "RUN"):
    for _ in range(3):
        head(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
```
-->
```python
import pandas

rows = pandas.read_parquet("RUN/rank00000/statistics")
rows[rows["site"] == "head:output.grad"][["step", "rms"]]
```
```python
import polars

rows = polars.read_parquet("RUN/rank00000/statistics/*.parquet")
rows.filter(polars.col("nan") > 0).select("step", "site", "nan")
```

## Events

{events}

Scalars are events of the kind `scalar`, and the loss of a step is the mean of its events of the kind `loss`. What the
program has logged has no `text`, and the last of a step counts. `recorded` are numbers of a process: of several
`eval_loss` is their mean, and `memory` the largest. `shards` is a norm of what a process holds, whose squares add up
over processes; for `update_ratio` it is that of the update, and `shards before` that of the weights. A learning rate
(`lr`) and the size of a batch (`batch`) are noted where they change; the `text` of a rate is its optimizer and group.

```sql
-- DuckDB
SELECT step, avg(value) AS loss FROM 'RUN/rank*/events/*.parquet' WHERE kind = 'loss' GROUP BY step ORDER BY step;
```
```sql
-- DuckDB
SELECT step, name, CASE
  WHEN bool_or(text = 'shards before')
    THEN sqrt(sum(value ^ 2) FILTER (text = 'shards') / sum(value ^ 2) FILTER (text = 'shards before'))
  WHEN bool_or(text = 'shards') THEN sqrt(sum(value ^ 2))
  WHEN name = 'eval_loss' THEN avg(value)
  WHEN name = 'memory' THEN max(value)
  ELSE arg_max(value, time) END AS value
FROM 'RUN/rank*/events/*.parquet'
WHERE kind = 'scalar' AND text IN ('', 'recorded', 'shards', 'shards before')
GROUP BY step, name ORDER BY name, step;
```

### Facts

What a recording notes beside statistics, for [findings](findings.md), are events too. Their `text` is a JSON object
with the fields below, but for numbers that are not known; `name` and `value` are columns. Lines are `file:line`.

One event may hold several facts: then `rows` are lists of what `each` names (of `name`, `value`, `step` and `phase`
those that are not the event's), all other fields are the same for all of them, and the event's `value` is how many they
are. Of a step whose calls are those of an earlier one, from the same lines, `calls` tells instead of `call`. Calls are
known of every step, also of those that are not recorded; `rg.explain` has them all one by one.

{facts}

What was critical while the run went on is an event of the kind `finding`, its `text` as a line of `findings.jsonl`:
`detector`, `severity`, `message`, `site`, `step`, `last_step`, `rank`, `line`, `evidence`, `precondition`, `refute`,
`repair`, `causes`.

## Tensors

A shard is a safetensors file of up to 64 MB. The name of a tensor in it is `step/micro/backward/phase/site`, with
`backward` −1 for values. Its bits are those that training used. The file's metadata may hold, under
`{notes}`, a JSON object of notes by name:

- `scale`: the gradient was multiplied by this for loss scaling, and is stored so; retrograd divides when reading.
- `kind: complex`: a last axis of two holds real and imaginary parts.
- `kind: bytes`: elements of a type that safetensors lacks, as uint8, with their `dtype` and `shape`.
- `sparse`: the shape of a sparse tensor; its values are under its name, its indices under `name#indices`.
- `crc32`: of dtype, shape and bytes of what is stored under its name, and of the indices of a sparse one.

A tensor that training changed in place before it was written is not stored; an event `overwritten` tells of it.

## manifest.json

`format`, `versions`, `command`, `seed`, `git` (`commit`, `dirty`), `host`, `platform`, `pid`, `started`, `sites`,
and what the recorder tells, such as `model`, `selection`, `batch` (that of the first training step) and `parameters`
(of the models that optimizers train, each tensor once). `resumed` lists the facts of each later session. `model`
has a row for each module: its `path`, `type`, number of own `parameters` and of `trainable` ones, their `dtype` and
`shapes`, `settings` as it shows them itself, and under `retrograd run` the `line` that constructed it. Where one
model is split over ranks, `split` tells with which `ranks` the rank that writes it shares each forward (tensor
parallelism), and which of its models are `stages` of a pipeline, as in `placements.json`.

Under a budget for overhead, `overhead` tells its `share`, how many `steps` there were, how many of these were
`recorded`, and with `updates`; what was `measured`, as a share of the time that the steps take by themselves, and what
of that lies `between` recorded steps: null where that is not known, as on a device, and `measured` is then beyond
unrecorded steps.

Where not all ranks were to record, `ranks` tells which: those that are `listed`, or one in so many (`every`). The
lowest of them writes the manifest.

Where `retrograd compact` has merged ranks, `compacted` tells which (`ranks`): all rows are then in the folder `merged`
of the first rank, with the names of sites that the history of all ranks has, and what is left in the folders
`statistics` is to be passed over. `differing` tells, of sites whose copies differed, the first step, the rank that
counts, and the one that differs.

All part files of statistics tell in their metadata which rows they have, so that opening a run reads none:
`retrograd.steps` the steps of each phase, `retrograd.sites` the sites. Other readers need neither, and need not write
them: what a file does not tell, or tells of other rows than it has, is read from the rows.

Rows of a part are sorted by site, those of a site by step, and its row groups end between sites: of one site an engine
reads a group of some 16,000 rows of each part. So rows are not in the order in which they were recorded; `order` tells
that. Small parts that are merged are sorted anew, 65,536 rows at a time. Files that `retrograd compact` has written
are sorted as a whole, and say `retrograd.sorted`. Parts of earlier versions are in the order of their steps.

## placements.json

There is one where several processes know of each other. `sites` tells for each site, by its name in this rank's
files, what the process holds:

- `holds`: `copy`, the same as other ranks; `shard`, a part of a tensor of which others hold the rest; `summand`, its
  addend of a sum that nobody has formed, which the history of all ranks shows as `….local`; `own`, something of its
  own, as of other data.
- `ranks`: the ranks that hold the very same elements, itself among them. Rows of one site and moment from ranks that
  are joined by such lists are copies: take those of one rank, unless they are summands.
- `placements`: torch's words for a `DTensor`: its placements, and the shape of its mesh.

`stages` tells, by the name of a model (empty for a single one), which stage of a pipeline it is. The names of its
sites are the stage's own. In the history of all ranks they begin with `stage1.`, unless the modules of all stages have
different names, as in the whole model; the stage itself is `stage1:output`.

A folder without this file is of one process, or of a version that did not write it: then nothing is known, and every
rank's rows add up.

## rank.json

`rank`, `status` (`running`, `finished`, `failed`; a process that died says `running` and does not hold its lock),
`attempt` (which process and program it is, the launch of torchrun's and its number there; `step`, at which it went on
with what an earlier attempt had recorded; `left`, the step and the weights' sums of squares with which it became
another program),
`pid`, `host`, `copied` (in a copy that `retrograd compact -o` has made: the process held its lock then),
`began` and `written` (seconds since the epoch), `first_step`, `last_step`, `rows`, `events` by kind,
`error` (the exception that ended it: `kind`, `message`, `in_backward`, `node`, `module`, `lines`), `tensor_bytes`, and
of the last session `tensors_dropped` (no room in the budget) and `lost`: rows, events and tensors that could not be
written.

## Runs in object storage

A run folder may be an address: `rg.record(model, "s3://bucket/runs/a")`, `retrograd run -o s3://bucket/runs/a
train.py`, `rg.open_run`, `retrograd view`, `explain`, `report`, `compare` and `export`. It needs
`pip install 'retrograd[remote]' s3fs` (`gcsfs` for `gs://`, `adlfs` for `abfs://`; whatever
[fsspec](https://filesystem-spec.readthedocs.io) knows and can list). `memory://runs/a` is of one process, for tests.
Credentials come from the environment or a profile, as those packages read them; an address with a name or a password
is refused. `file:///runs/a` is a local folder.

A run is written to a folder of this machine first, below `runs`: the address with a short number. It stays there, and
can be read like any other. Every thirty seconds, at `flush()` and at the end its closed files are put to the address,
each once, `rank.json` and the manifest after the others. What lies there is the same, file by file.

- Training never waits for the store. While it does not answer or refuses, there is a warning that names the local
  folder, and the files are put once it answers. At the end it is waited for, for a minute; what was not put then is in
  the local folder: `aws s3 cp --recursive runs/FOLDER s3://bucket/runs/a`, or fsspec's `put`.
- A process that is killed loses what waits to be written, thirty seconds at most. What was put is at the address; what
  was not is in the local folder.
- There are no locks at an address. Recording to one that holds the same rank is refused, but two machines that begin
  within the same moment are not told apart: give each run an address of its own. A run whose process was killed reads
  as `running` for two minutes, then as `stopped`; clocks that are minutes apart are not seen.
- `resume=True` continues the local folder; where there is none, what lies at the address is fetched first. Where the
  address was written later than the local folder, by another machine, it is refused: remove the local folder.
- A put holds the file in memory: a shard of 64 MB at most, or a merged part of a million rows. One rank makes some 480
  puts an hour.
- Python closes what network clients need before it calls `atexit` functions, so a recording that nobody closes ends
  when the main thread does: threads that go on training behind it are not recorded.
- Reading asks for a part file at once, up to 16 MB; of a larger one for its footer, and then for what it needs of each
  row group; of a shard for its header, and then for single tensors. Each rank takes some ten requests, each part three.
- A reader waits a minute for a store that answers nothing at all, and then raises `run-unreachable`; in the middle of a
  large part it waits as long as the client of the store does.
- Of this machine alone are: rings of `rg.watch_hangs`, traces, bundles, features, spill files of saved tensors.

Other tools read it where it lies: `duckdb.sql("FROM 's3://bucket/runs/a/rank*/statistics/*.parquet'")`,
`pandas.read_parquet("s3://bucket/runs/a/rank00000/statistics")`,
`polars.scan_parquet("s3://bucket/runs/a/rank*/statistics/*.parquet")`.
"""


def describe_run_folder() -> str:
    """The page, in Markdown."""
    return _PAGE.format(
        format=FORMAT,
        places=_lay_out(["file", "what it is"], [(f"`{place.path}`", place.text) for place in PLACES]),
        statistics=_describe_columns(STATISTICS_COLUMNS) + _OF_USERS,
        events=_describe_columns(EVENT_COLUMNS),
        facts=_lay_out(["kind", "what it is", "fields"], list(map(_describe_fact, FACTS))),
        notes=NOTES,
    )


_OF_USERS = """

Then one float64 column for each statistic of a user; and `calls:NAME` where ranks were merged and not all calls of a
row have a value of `NAME`, whose mean it holds: how many have."""


def _describe_columns(columns: Sequence[Column]) -> str:
    lines = [(f"`{column.name}`", _name_type(column.type), column.text) for column in columns]
    return _lay_out(["column", "type", "what it is"], lines)


def _describe_fact(fact: type[Fact]) -> tuple[str, str, str]:
    """Kind, meaning and fields of a fact, from its docstring."""
    about, _, listed = inspect.cleandoc(fact.__doc__ or "").partition("Attributes:\n")
    fields = re.sub(r"(?:^|\n) {4}(\w[\w, ]*): ", lambda name: f" {_quote_names(name[1])}: ", listed.rstrip())
    return f"`{fact.kind}`", _make_markdown(about), _make_markdown(fields)


def _quote_names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def _make_markdown(text: str) -> str:
    """A docstring's text on one line; of roles (``:class:`Operation```) what they name."""
    plain = re.sub(r":\w+:`([^`]*)`", r"`\1`", " ".join(text.split()).replace("``", "`"))
    return re.sub(r"`retrograd\.[\w.]*\.(\w+)`", r"`\1`", plain)


def _name_type(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        return _name_type(kind.value_type)
    if pa.types.is_list(kind):
        return f"list of {_name_type(kind.value_type)}"
    return {"double": "float64"}.get(str(kind), str(kind))


def _lay_out(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    table = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in table)


if __name__ == "__main__":
    Path(__file__).with_name("run_folder.md").write_text(describe_run_folder(), encoding="utf-8")
