# ruff: noqa: INP001  # a folder of pages, not a package
"""Makes the table of ``kinks.md`` from the code: ``python docs/make_kinks.py``."""

from __future__ import annotations

from pathlib import Path

from retrograd.explaining.kinks.table import put_table_in

if __name__ == "__main__":
    page = Path(__file__).with_name("kinks.md")
    page.write_text(put_table_in(page.read_text(encoding="utf-8")), encoding="utf-8")
