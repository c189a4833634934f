# ruff: noqa: INP001  # a folder of pages, not a package
"""Makes ``findings.md`` from the detectors: ``python docs/make_findings.py``."""

from __future__ import annotations

from pathlib import Path

from retrograd.explaining.findings.describe import describe_findings

if __name__ == "__main__":
    Path(__file__).with_name("findings.md").write_text(describe_findings(), encoding="utf-8")
