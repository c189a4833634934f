# ruff: noqa: INP001  # a folder of pages, not a package
"""Makes ``run_folder.md`` from the code: ``python docs/make_schema.py``."""

from __future__ import annotations

from pathlib import Path

from retrograd.core.runs.describe import describe_run_folder

if __name__ == "__main__":
    Path(__file__).with_name("run_folder.md").write_text(describe_run_folder(), encoding="utf-8")
