"""A step of building the pages: formulas become MathML, which browsers draw without a script."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Turn every formula of a page from TeX to MathML."""

    def drawn(match: re.Match[str]) -> str:
        display = "inline" if match[2] == "(" else "block"
        return str(convert(html.unescape(match[3]).strip(), display=display))

    return FORMULA.sub(drawn, content)
