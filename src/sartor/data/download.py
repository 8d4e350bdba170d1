"""Published files: where they are kept, and how one is fetched and checked."""

from __future__ import annotations

import hashlib
import os
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from sartor import __version__
from sartor.files import replacing

PIECE = 1 << 16
PATIENCE = 30.0  # seconds without a byte


def user_cache() -> Path:
    """The folder where this system's programs keep what they could fetch again."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "sartor"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "sartor"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sartor"


def fetch(url: str, md5: str, place: Path, words: str) -> None:
    """Download a file; unless it is whole and what was published, nothing is left at ``place``."""
    request = urllib.request.Request(url, headers={"User-Agent": f"sartor/{__version__}"})
    digest = hashlib.md5(usedforsecurity=False)
    with (
        closing(urllib.request.urlopen(request, timeout=PATIENCE)) as answer,
        replacing(place) as part,
        open(part, "wb") as out,
    ):
        for piece in _shown(answer, words):
            digest.update(piece)
            out.write(piece)
        out.flush()
        if digest.hexdigest() != md5:
            raise ValueError(f"its md5 hash is {digest.hexdigest()}, published is {md5}")


def _shown(answer: Any, words: str) -> Iterator[bytes]:
    """The pieces of an answer, with a progress bar where there is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        length = answer.headers.get("Content-Length")
        task = progress.add_task(words, total=int(length) if length else None)
        while piece := answer.read(PIECE):
            progress.update(task, advance=len(piece))
            yield piece
