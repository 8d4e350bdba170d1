"""A step of building the pages: formulas become MathML, which browsers draw without a script."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)

BLOCK = "margin: 1em 0; padding: 0.2em 0; overflow-x: auto"
"""How a formula of its own stands: apart from its neighbours, and one that is too wide can be scrolled."""

LEFT_OVER = re.compile(r"<(m[io])([^>]*)>\\([A-Za-z]+|.)</\1>")
KNOWN = {
    **{"arg": "arg", "lVert": "‖", "rVert": "‖", "lvert": "|", "rvert": "|", "|": "‖"},
    **{"lceil": "⌈", "rceil": "⌉", "{": "{", "}": "}"},
}
"""Commands that the converter leaves as they are, such as brackets of a given size, and what they mean."""


def on_page_content(content: str, **_: Any) -> str:
    """Turn every formula of a page from TeX to MathML."""

    def drawn(match: re.Match[str]) -> str:
        display = "inline" if match[2] == "(" else "block"
        text = html.unescape(match[3]).strip()

        def known(found: re.Match[str]) -> str:
            if found[3] not in KNOWN:
                raise ValueError(f"\\{found[3]} cannot be drawn, in the formula {text}")
            return f"<mo{found[2]}>{KNOWN[found[3]]}</mo>"

        formula = LEFT_OVER.sub(known, str(convert(text, display=display)))
        return formula if display == "inline" else f'<div style="{BLOCK}">{formula}</div>'

    return FORMULA.sub(drawn, content)
