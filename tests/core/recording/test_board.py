"""Where no store answers there is no board, and nothing is raised: a budget records every step then."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from retrograd.core.ranks import board
from retrograd.core.ranks.board import StoreBoard, find_board


class Silent(dist.Store):
    """A store that can do nothing, as that of a group that stands for others."""


@pytest.mark.parametrize("store", [None, Silent()], ids=["none", "silent"])
def test_a_group_without_a_store_has_no_board(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    monkeypatch.setattr(board, "has_other_processes", lambda: True)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    assert find_board("name") is None


def test_one_leads_and_all_read_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    store, boards = dist.HashStore(), []
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        boards.append(StoreBoard(store, "name"))
    first, second = boards
    assert (first.is_led, second.is_led) == (True, False)
    first.post("a")
    assert list(second.read()) == ["a"]
    first.post("b")
    first.post("c")
    assert list(second.read()) == ["b", "c"]
    assert list(second.read()) == []
    assert list(first.read()) == ["a", "b", "c"]
    assert list(StoreBoard(store, "other").read()) == []
