"""Placements of tensors, what each rank holds at its sites: written by its process, and read to merge ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.core.errors import DamagedRunError, RunUnreachableError
from retrograd.core.files import write_json
from retrograd.core.foreign.text import check_kinds, read_json
from retrograd.core.history.copies import Copies, find_lags, join_groups
from retrograd.core.runs.layout import PLACEMENTS
from retrograd.core.sites.site import ROOT, WATCH, own_addend, parse_leniently

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Placements:
    """The tensors that one rank holds, site by site.

    Attributes:
        sites: for each site ``holds``, ``ranks``, and ``placements`` where torch has words for them.
        stages: for each model that is a part of a pipeline, by its name, which stage it is.
        shared: paths that several stages have, where these keep the names of the whole model; None where they do not.
    """

    sites: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stages: Mapping[str, int] = field(default_factory=dict)
    shared: frozenset[str] | None = None

    def rename(self, site: str) -> str:
        """The name that a site has in the history of all ranks.

        Stages may use one name for different parts of a model: ``0:output`` of the second is ``stage1.0:output``. Where
        they keep the names of the whole model, that is done with what several have alone: ``stage1.layers:output``. An
        addend of a sum that nobody has formed does not get the name of the sum: it is ``0:output.local``.
        """
        if self.sites.get(site, {}).get("holds") == "summand":
            site = str(own_addend(parse_leniently(site)))
        if not self.stages:
            return site
        found = parse_leniently(site)
        stage = self.find_stage(found.path)
        if stage is None or (self.shared is not None and found.path not in self.shared):
            return site
        return str(replace(found, path=_add_stage(found.path, stage)))

    def find_stage(self, path: str) -> int | None:
        """The stage that a path is in; None where it is in none."""
        for model, stage in self.stages.items():
            if not model or path == model or path.startswith(f"{model}."):
                return stage
        return None


def _add_stage(path: str, stage: int) -> str:
    if path == ROOT:
        return f"stage{stage}"
    prefix = WATCH if path.startswith(WATCH) else ""
    return f"{prefix}stage{stage}.{path.removeprefix(prefix)}"


def write_placements(folder: Path, told: Mapping[str, Any]) -> None:
    """Write the file of a rank; what a session before this one told of other sites stays.

    Raises:
        DamagedRunError: the file that is there cannot be read.
        OSError: it cannot be written.
    """
    earlier = read_placements(folder)
    sites = {**earlier.sites, **told["sites"]}
    write_json(folder / PLACEMENTS, {"stages": dict(told["stages"]), "sites": sites})


def read_placements(folder: Path) -> Placements:
    """The file of a rank; empty where there is none: one process alone, or a run of a version that did not know.

    Raises:
        DamagedRunError: it cannot be read.
    """
    path = folder / PLACEMENTS
    if not path.exists():
        return Placements()
    try:
        content = read_json(path)
        check_kinds(content, {"stages": dict[str, int], "sites": dict[str, dict[str, Any]]})
        for fact in content["sites"].values():
            check_kinds({"holds": None, "ranks": None, **fact}, {"holds": str, "ranks": list[int]})
        return Placements(content["sites"], content["stages"])
    except RunUnreachableError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise DamagedRunError(f"{str(path)!r} cannot be read: {error!r}.", repair="remove that file.") from error


def name_stages(placements: Mapping[int, Placements]) -> dict[int, Placements]:
    """Let stages keep the names of their modules where these are those of the whole model: each is in one stage alone.

    What holds other modules may be in several, as ``layers`` is, and the stage itself.
    """
    stages_of: dict[str, set[int]] = {}
    for each in placements.values():
        for path in {parse_leniently(site).path for site in each.sites} if each.stages else ():
            stage = each.find_stage(path)
            if stage is not None:
                stages_of.setdefault(path, set()).add(stage)
    holders = {path[:at] for path in stages_of for at, sign in enumerate(path) if sign == "."}
    shared = frozenset({path for path, stages in stages_of.items() if len(stages) > 1} | {ROOT})
    are_kept = len(set().union(*stages_of.values())) > 1 and all(
        path in holders or path == ROOT or path.startswith(WATCH) for path in shared
    )
    return {rank: replace(each, shared=shared if are_kept else None) for rank, each in placements.items()}


def find_copies(
    placements: Mapping[int, Placements], code_of: Mapping[str, int], lasts: Mapping[int, tuple[IntArray, IntArray]]
) -> Copies | None:
    """Find which ranks hold the same at which site; None where none do. A rank of which nothing is known holds its own.

    Args:
        placements: of each rank.
        code_of: the number of each site in the history.
        lasts: of each rank the steps that it has ended in an update, rising, and the last micro-batch of each.
    """
    listed: dict[int, list[list[int]]] = {}
    for each in placements.values():
        for site, fact in each.sites.items():
            ranks = [rank for rank in fact["ranks"] if rank in placements]
            code = code_of.get(each.rename(site)) if len(ranks) > 1 and fact["holds"] != "summand" else None
            if code is not None:
                listed.setdefault(code, []).append(ranks)
    groups = {code: join_groups(found) for code, found in listed.items()}
    names = {code: name for name, code in code_of.items() if code in groups}
    if not groups:
        return None
    return Copies(groups, names, find_lags(lasts))
