"""What algorithms cannot reach: clients' samples, devices, engines."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sartor.algorithms

FILES = sorted(Path(sartor.algorithms.__file__).parent.rglob("*.py"))
BEHIND = {"engine", "samples", "device", "states", "queue"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_algorithm_sees_a_federation_and_nothing_behind_it(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            reached = node.value.id == "federation" and (node.attr in BEHIND or node.attr.startswith("_"))
            assert not reached, f"{path.name}, line {node.lineno}: federation.{node.attr}"
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith(("sartor.engines", "sartor.runs", "sartor.remote"))
