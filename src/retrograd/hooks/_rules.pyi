from collections.abc import Callable
from typing import Any

class GradientHook:
    def __init__(
        self,
        otherwise: Any,
        factory: Any,
        clock: Any,
        listeners: Any,
        tensor_type: type,
        compiles: Callable[[], Any],
        steps: list[tuple[Any, Any, Callable[..., Any]]],
        call: int,
        acquire: Callable[[], Any],
        release: Callable[[], Any],
        explain: Callable[[Any, Exception], None],
        check: Callable[[Any, Any, int, Any], None],
        /,
    ) -> None: ...
    def __call__(self, gradient: Any, /) -> Any: ...
