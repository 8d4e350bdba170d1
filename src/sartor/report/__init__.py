"""Reports: run folders as one HTML page that opens anywhere, and as figures for paper.

Imports studies and runs, for what they stored; nothing but commands imports it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sartor.errors import SartorError
from sartor.files import replacing
from sartor.report.figures import figures as make_figures
from sartor.report.html import page
from sartor.report.images import write_figures
from sartor.report.prices import price_figures
from sartor.report.runs import read
from sartor.report.sites import site_figures, sites_of

__all__ = ["write_report"]


def write_report(
    runs: str | Path | Iterable[str | Path],
    out: str | Path = "report.html",
    *,
    figures: str | Path | None = None,
    format: str = "png",
) -> Path:
    """Write a report of run folders to one HTML file and return its path.

    ``runs`` are run folders, folders that hold run folders, or folders of a comparison. The file needs
    nothing beside it and no network. With ``figures``, every figure is also written to that folder, as
    ``png`` or ``pdf``.

    >>> import sartor, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> result = sartor.run("separate", data="digits", clients=3, rounds=1, out=f"{folder}/run")
    >>> write_report(result.folder, f"{folder}/report.html").stat().st_size > 1_000_000
    True
    """
    material = read([runs] if isinstance(runs, (str, Path)) else runs)
    sites = sites_of(material)
    drawn = [
        *([] if sites is None else site_figures(sites)),
        *make_figures(material),
        *price_figures(material),
    ]
    path = Path(out)
    _write(path, page(material, drawn))
    if figures is not None:
        write_figures(drawn, figures, format)
    return path


def _write(path: Path, text: str) -> None:
    """A whole file, or the one that was there before."""
    if path.is_dir():
        raise SartorError(f"{path}: is a folder; give the report a file name, as in {path / 'report.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SartorError(f"{path}: the report cannot be written: {error.strerror or error}") from None
