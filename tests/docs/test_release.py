"""What a release is made of says one thing: the package, the recipe for conda, the citation, the workflow."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import sartor

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    stated: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return stated["project"]


@pytest.fixture(scope="module")
def recipe() -> str:
    return (ROOT / "packaging" / "conda" / "meta.yaml").read_text(encoding="utf-8")


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    assert match is not None, pattern
    return match[1]


def test_all_state_one_version(project: dict[str, Any], recipe: str) -> None:
    cited = found(r'^version: "?([\w.]+)', (ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {cited, found(r'set version = "([\w.]+)"', recipe), sartor.__version__} == {project["version"]}


def test_conda_installs_what_the_package_needs(project: dict[str, Any], recipe: str) -> None:
    run = recipe.partition("  run:\n")[2].partition("\n\n")[0]
    wanted = {line.strip("- ").replace(" ", "") for line in run.splitlines()}
    needed = {line.replace("torch>", "pytorch>") for line in project["dependencies"]}
    assert wanted == needed | {f"python{project['requires-python']}"}


def test_versions_of_python_that_are_promised_are_tested(project: dict[str, Any]) -> None:
    promised = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert re.findall(r'"(3\.\d+)"', found(r"python: (\[.*\])", workflow)) == promised
    assert project["requires-python"] == f">={promised[0]}"
