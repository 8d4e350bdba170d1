"""The notebooks run as they stand, and what is stored in them is small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

BOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
def test_the_notebooks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other in one process, as importing takes longest, and nothing is left between."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cells = [cell for path in BOOKS for cell in [*read(path).cells, nbformat.v4.new_code_cell("%reset -f")]]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    had_outputs = [bool(cell.get("outputs")) for cell in cells]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert [bool(cell.get("outputs")) for cell in cells] == had_outputs


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_has_its_outputs(path: Path) -> None:
    assert path.stat().st_size < 20_000
    assert any(cell.get("outputs") for cell in read(path).cells)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)
