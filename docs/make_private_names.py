# ruff: noqa: INP001  # a folder of pages, not a package
"""Makes ``private_names.md`` from the code: ``python docs/make_private_names.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from retrograd.core.hooks.private_names import NEEDED, OPTIONAL, PrivateNames, write_name

PAGE = Path(__file__).with_name("private_names.md")
HEAD = """# What we use of torch that is not public

retrograd rests on names of torch's that may change with any release. These are all of them, from
`core/hooks/private_names.py`, which a test holds to the source. An attribute that retrograd sets, and that newer
versions of torch ask for, is written as `._name`. The tests run with the oldest torch that is supported and with the
newest, and take names away to see that what stands under *without* happens. `retrograd doctor` says which of these
names your torch has.
"""


def build_page() -> str:
    """The whole page."""
    needed = sum(len(_list_names(each)) for each in NEEDED)
    optional = sum(len(_list_names(each)) for each in OPTIONAL.values())
    parts = (
        HEAD,
        f"## Needed: {needed} names\n",
        *_table(NEEDED),
        f"\n## May be missing: {optional} names\n",
        "All of them belong to torch.compile. Where one is missing, that is said once, and what it buys is left.\n",
        *_table(OPTIONAL.values()),
    )
    return "\n".join(parts) + "\n"


def _table(groups: Iterable[PrivateNames]) -> Iterator[str]:
    yield "| for | without | names |"
    yield "|---|---|---|"
    for each in groups:
        yield f"| {each.buys} | {each.without} | {' '.join(f'`{name}`' for name in _list_names(each))} |"


def _list_names(group: PrivateNames) -> list[str]:
    return list(dict.fromkeys(map(write_name, group.names)))


if __name__ == "__main__":
    PAGE.write_text(build_page(), encoding="utf-8")
