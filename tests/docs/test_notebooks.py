"""The notebooks run as they stand, and what is stored in them is small."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

BOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run_and_show_what_they_did(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", module)
    for cell in read(path).cells:
        if cell.cell_type == "code":
            result = value_of(cell.source, module)
            shown = result is not None or bool(capsys.readouterr().out)
            stored = any(output.get("name") != "stderr" for output in cell.outputs)  # what is logged
            assert shown == stored, cell.source


def value_of(source: str, module: ModuleType) -> Any:
    """Run a cell, and give what its last line is if that is an expression, as a notebook shows it."""
    lines = ast.parse(source).body
    last = lines.pop() if isinstance(lines[-1], ast.Expr) else None
    exec(compile(ast.Module(lines, []), "cell", "exec"), module.__dict__)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), "cell", "eval"), module.__dict__)


@pytest.mark.nightly
def test_the_notebooks_run_in_jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
