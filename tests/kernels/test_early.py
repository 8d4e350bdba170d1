"""As kernels are compiled, they touch no memory before it is their turn, and store numbers by fours."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import sartor.kernels
from helpers import ENVIRONMENT, completed

triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
SOURCES = sorted(Path(sartor.kernels.__file__).parent.glob("*_triton.py"))
TOUCHES = re.compile(r"\b(ld\.global|st\.global|cp\.async|atom\.|red\.)")


def launches(tree: ast.AST) -> Iterator[ast.Call]:
    """What is launched: ``kernel[grid](...)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            yield node


def test_every_kernel_waits_for_its_turn_first_and_every_launch_says_so() -> None:
    kernels = 0
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for launch in launches(tree):
            options = [ast.unparse(word.value) for word in launch.keywords if word.arg is None]
            assert options == ["EARLY"], (path, launch.lineno)
            assert isinstance(launch.func, ast.Subscript)
            if isinstance(launch.func.value, ast.Name):  # another one is written where it is needed
                docstring, first = functions[launch.func.value.id].body[:2]
                assert isinstance(docstring, ast.Expr)
                assert ast.unparse(first) == "wait_turn()", (path, first.lineno)
                kernels += 1
    assert kernels >= 24


@cache
def compiled(capability: int) -> dict[str, str]:
    """Every kernel in PTX."""
    program = Path(__file__).with_name("offline.py")
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, sys.path))
    done = completed([sys.executable, str(program), str(capability)], env={**environment, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    every: dict[str, str] = json.loads(done.stdout)
    return every


@pytest.mark.slow
@triton
@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_kernels_wait_before_they_touch_memory_where_a_device_can(capability: int) -> None:
    every = compiled(capability)
    assert len(every) == 1 + sum(len(kernels_of(path)) for path in SOURCES)
    for name, code in every.items():
        touched = TOUCHES.search(code)
        assert touched, name
        assert ("griddepcontrol.wait" in code[: touched.start()]) is (capability >= 90), name
        assert code.count("griddepcontrol") == (capability >= 90), name  # nobody is let in before


@pytest.mark.slow
@triton
@pytest.mark.parametrize("capability", [80, 90])
def test_gradients_of_weights_are_stored_by_fours(capability: int) -> None:
    """They lie one after the other, which the compiler must see: single stores cost a tenth of a round."""
    assert "st.global.v4" in compiled(capability)["convolution_triton._correlate"]


def kernels_of(path: Path) -> set[str]:
    """The kernels of a module that stand there as they are launched."""
    tree = ast.parse(path.read_text())
    return {ast.unparse(launch.func.value) for launch in launches(tree)} & {  # type: ignore[attr-defined]
        node.name for node in tree.body if isinstance(node, ast.FunctionDef)
    }
