"""A traced step, which is rewritten several times before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


class Graph(fx.GraphModule):
    """A graph whose code is made when it is first asked for: what rewrites it need not wait for that."""

    def recompile(self) -> Any:
        """Forget the code; every graph has a class of its own, which has it."""
        if "forward" in vars(type(self)):
            del type(self).forward

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The code, made now."""
        super().recompile()
        made: Callable[..., Any] = self.forward
        return made

    @property
    def code(self) -> str:
        """The same as text."""
        assert self.forward is not None
        return super().code
