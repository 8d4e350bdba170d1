"""A step of building the reference: docstrings as pages are written, with examples as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
ROLE = re.compile(r":(?:func|class|meth|mod|attr):`~?([^`]+)`")


class Docstrings(griffe.Extension):
    """Fences examples, and writes names of other things as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change an object's docstring, where it has one."""
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)


def readable(text: str) -> str:
    """A docstring as Markdown."""
    fenced = EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", text)
    return ROLE.sub(lambda match: f"`{match[1]}`", fenced)
