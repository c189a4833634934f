import runpy
from pathlib import Path

import pyarrow.parquet as pq

from retrograd.core.history.table import EVENT_COLUMNS, STATISTICS_COLUMNS
from retrograd.core.runs.layout import PLACES
from tests.core.runs.written import write_run

PAGE = Path(__file__).parents[3] / "docs" / "run_folder.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == runpy.run_path(str(PAGE.with_name("make_schema.py")))["describe_run_folder"](), (
        "run `python docs/make_schema.py`"
    )


def test_the_page_names_every_file_that_is_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", range(1))
    named = {path.strip() for place in PLACES for path in place.path.split(",")}
    assert {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()} <= named


def test_the_tables_have_the_columns_of_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", range(1))
    for kind, columns in (("statistics", STATISTICS_COLUMNS), ("events", EVENT_COLUMNS)):
        found = pq.read_schema(run / "rank00000" / kind / "part-00000000-00000000.parquet")
        assert found.names == [column.name for column in columns]
