"""The examples in docstrings run."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

import sartor

NEEDS_TRITON = {f"sartor.kernels.{kind}_triton" for kind in ("convolution", "pooling", "products", "shuffle")}
MODULES = ["sartor", *(module.name for module in walk_packages(sartor.__path__, "sartor."))]


@pytest.mark.parametrize("name", [name for name in MODULES if name not in NEEDS_TRITON | {"sartor.__main__"}])
def test_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(import_module(name)):
        if test.examples:  # a run of none takes as long as one of a few
            runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
    assert list(tmp_path.iterdir()) == []  # examples write elsewhere: they may be run from any folder
