"""A sample of the corpus of faults, scored as the benchmark does it; and the corpus itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from retrograd.findings.detectors import DETECTORS

CORPUS = Path(__file__).parents[2] / "benchmarks" / "findings"
SAMPLE = [
    "missing-zero-grad/recommender",
    "learning-rate-too-high/digits_mlp",
    "nan-forward/recommender",
    "failed/digits_cnn",
    "triplet_zero",
    "multitask_turns",
]
