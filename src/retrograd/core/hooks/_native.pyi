from array import array
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

def follow(nodes: list[Any], several: set[Any], most: float, /) -> bytes: ...
def number_nodes(nodes: list[Any], /) -> bytes: ...
def order_upwards(nodes: list[Any], links: array[int], leaf: int, /) -> list[Any] | None: ...
def show_calls(functions: tuple[Any, ...], listener: Callable[[Any, tuple[Any, ...], Any], None] | None, /) -> bool: ...

class OperationTap:
    def __init__(
        self,
        logs: Any,
        here: Any,
        writes: Any,
        otherwise: Callable[..., Any],
        fail: Callable[[Exception], None],
        tensor_type: type,
        sequence_number: Callable[[], int],
        torchs_way: CodeType,
        is_inner: Mapping[str, bool],
        to_arrays: tuple[Any, ...],
        most: int,
    ) -> None: ...
    def call(self, mode: Any, function: Any, types: Any, args: Any, kwargs: Any = ..., /) -> Any: ...
