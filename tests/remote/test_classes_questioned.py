"""Nodes whose labels may not mean the same: the server asks before it begins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flower_grid import HereGrid

from sartor.remote.join import loader
from sartor.remote.node import Node
from sartor.remote.serve import Service, serve_on
from sartor.runs.experiment import load


@pytest.mark.parametrize(("words", "asked"), [((), True), (("expect.classes=7",), False)])
def test_labels_0_and_1_here_and_5_and_6_there_are_questioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, words: tuple[str, ...], asked: bool
) -> None:
    nodes = {}
    for number, first in enumerate((0, 5), 1):
        path = tmp_path / f"{number}.npz"
        np.savez(path, x=np.eye(8, 3), y=first + np.arange(8) % 2)
        nodes[number] = Node(loader(path, None, None, None))
    settings = ["data.clients=2", "model.name=softmax", "engine.name=loop", *words]
    serve_on(HereGrid(nodes), load(None, settings, rounds=1), Service(deadline=20), out=tmp_path / "run")
    assert ("nodes have from 2 to 7 classes, by their largest labels" in caplog.text) == asked
