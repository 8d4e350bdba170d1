"""The code in the README and the docs runs, each page from top to bottom in a folder of its own."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from flower_processes import free_port, program
from typer.testing import CliRunner

from helpers import ENVIRONMENT, completed
from sartor.commands.main import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
README = ROOT / "README.md"
BLOCK = re.compile(r"^```(python|sh|toml)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def run_block(kind: str, code: str, page: Path, module: ModuleType) -> None:
    file = re.match(r"# (\w+\.(?:py|toml))\n", code)
    if file:  # a file of the reader's own
        Path(file[1]).write_text(code, encoding="utf-8")
    elif kind == "python":
        exec(compile(code, str(page), "exec", dont_inherit=True), module.__dict__)
    elif kind == "toml":
        Path("experiment.toml").write_text(code, encoding="utf-8")
    elif all(words[0] == "sartor" for words in command_lines(code)):  # needs no shell
        for words in command_lines(code):
            result = CliRunner().invoke(app, words[1:], prog_name="sartor")
            assert result.exit_code == 0, f"{words}\n{result.stderr}\n{result.exception}"
    else:
        programs = Path("programs").absolute()
        programs.mkdir(exist_ok=True)
        for name in ("sartor", "torchrun"):
            program(programs, name)
        path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        code = code.replace("18080", str(free_port()))
        done = completed(["bash", "-euc", code], env={**ENVIRONMENT, "PATH": path})
        assert done.returncode == 0, f"{code}\n{done.stderr}"


def command_lines(code: str) -> Iterator[list[str]]:
    """The words of every command."""
    for line in code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(DOCS))
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look their module up
    for kind, code in blocks(page):
        run_block(kind, code, page, module)


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for kind, code in blocks(README):
        if kind == "python":
            run_block(kind, code, README, module)


def test_the_example_of_an_algorithm_is_short() -> None:
    (example,) = [code for _, code in blocks(README) if "@register" in code]
    assert len(example.splitlines()) < 40


def test_what_readers_write_to_extend_sartor_is_short() -> None:
    written = [code for kind, code in blocks(DOCS / "extend.md") if kind == "python"]
    for seam in (
        "@register\n",
        "@register_model",
        "@register_data",
        "@register_transform",
        "sartor.Observer",
    ):
        assert sum(seam in code for code in written) == 1, seam
    assert all(len(code.splitlines()) <= 30 for code in written)


def test_links_between_pages_lead_somewhere() -> None:
    for page in [README, *PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:=\s]+?)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
