"""Some of torch's operators, checked as ``benchmarks/operators.py`` checks all of them.

In a process of their own: torch's list of operators changes torch when it is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

OPERATORS = (
    "add", "atan2", "baddbmm", "cat", "cdist", "cholesky_solve", "clamp", "complex", "cumprod", "diag_embed",
    "einsum", "fft.rfft2", "floor", "gather", "index_put", "kron", "linalg.det", "linalg.eigh", "linalg.lstsq",
    "linalg.norm.subgradients_at_zero", "linalg.svd", "linalg.vander", "logcumsumexp", "lu_unpack", "masked_scatter",
    "max.reduction_with_dim", "nn.functional.batch_norm", "nn.functional.conv2d", "nn.functional.cross_entropy",
    "nn.functional.dropout", "nn.functional.embedding_bag", "nn.functional.grid_sample",
    "nn.functional.layer_norm", "nn.functional.max_pool2d", "nn.functional.scaled_dot_product_attention", "polar",
    "prod", "scatter_reduce.amax", "sort", "split", "stft", "sum_to_size", "to_sparse", "unbind", "where",
)  # fmt: skip

SPOILED = "spoiled"
"""A run of one operator in which what retrograd gives is replaced by nothing."""

CHECK = f"""
import json, sys, warnings
warnings.simplefilter("ignore")
import operators
names, samples = json.loads(sys.argv[1]), 2
known = {{each.name: each for each in operators.find_operators()}}
found = {{name: vars(operators.check_operator(known[name], samples)) for name in names}}
operators.rerun = lambda node, incoming: (None,) * len(node.next_functions)
operators.run_from = lambda start, *args, accumulate: dict.fromkeys(operators.find_leaves(start))
found["{SPOILED}"] = vars(operators.check_operator(known["exp"], samples))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Any]:
    ran = warm.run(
        [sys.executable, "-c", CHECK, json.dumps(OPERATORS)],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_seen_rerun_and_replayed_to_the_last_bit(verdicts: dict[str, Any], name: str) -> None:
    verdict = verdicts[name]
    assert not verdict["failures"]
    assert verdict["samples"], verdict["skipped"]


def test_a_difference_would_be_found(verdicts: dict[str, Any]) -> None:
    assert set(verdicts[SPOILED]["failures"]) == {"rerun", "whole"}
