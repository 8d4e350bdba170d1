"""The bench beside other frameworks: one workload, the same computed by all, tables of what was found."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from peers import by_pytorch, by_sartor, draw, measure, network
from peers.workload import (
    MODELS,
    WORKLOADS,
    Clock,
    Samples,
    Workload,
    cpu_seconds,
    initial,
    read,
    report,
)

SMALL = {
    model: Workload(model, model, clients=3, samples=4, drawn=3, batch=4, epochs=2, lr=0.1)
    for model in ("mlp", "cnn")
}


@pytest.fixture
def data() -> Samples:
    rng = np.random.default_rng(0)
    x, y = rng.random((3, 4, 1, 28, 28), dtype=np.float32), rng.integers(0, 10, (3, 4))
    return Samples(x, y, x[0], y[0])


def vector(model: torch.nn.Module) -> np.ndarray:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda each: each.name)
def test_a_workload_has_whole_batches_and_samples_enough(workload: Workload) -> None:
    assert workload.steps * workload.batch == workload.epochs * workload.samples
    assert workload.clients * workload.samples <= 30_000
    assert workload.drawn <= workload.clients


@pytest.mark.parametrize("model", MODELS)
def test_the_module_has_the_shapes_and_the_first_weights_of_the_workload(model: str) -> None:
    drawn = initial(SMALL[model])
    built = list(network.module(SMALL[model]).parameters())
    assert [tuple(each.shape) for each in built] == list(MODELS[model].shapes)
    assert all(np.array_equal(each.detach(), values) for each, values in zip(built, drawn, strict=True))
    for weight, bias in zip(drawn[::2], drawn[1::2], strict=True):
        bound = 1 / np.sqrt(np.prod(weight.shape[1:]))
        assert max(np.abs(weight).max(), np.abs(bias).max()) <= np.float32(bound)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_sartor_computes_what_a_loop_by_hand_does(engine: str, data: Samples) -> None:
    """Batches are whole clients, so that their order matters to rounding alone."""
    workload = SMALL["mlp"]
    by_hand = vector(by_pytorch.train(workload, data, 2, "cpu", Clock()))
    clock = Clock()
    model = by_sartor.train(workload, data, 2, "cpu", clock, name=engine)
    assert len(clock.rounds) == 2
    assert np.abs(by_hand - vector(network.module(workload))).max() > 1e-3
    np.testing.assert_allclose(vector(model), by_hand, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("over", ["vmap", "map"])
@pytest.mark.parametrize("model", MODELS)
def test_jax_computes_what_a_loop_by_hand_does(model: str, over: str, data: Samples) -> None:
    pytest.importorskip("jax")
    from peers import by_jax

    workload = SMALL[model]
    by_hand = by_pytorch.train(workload, data, 2, "cpu", Clock())
    weights = by_jax.train(workload, data, 2, over, Clock())
    x = data.x_test
    with torch.no_grad():
        said = by_hand(torch.from_numpy(x)).numpy()
    found = by_jax.NETWORKS[model](weights, np.moveaxis(x, 1, 3))
    np.testing.assert_allclose(found, said, rtol=1e-3, atol=1e-4)


def test_a_file_of_images_is_read(tmp_path: Path) -> None:
    import gzip

    numbers = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    head = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in numbers.shape)
    (tmp_path / "file.gz").write_bytes(gzip.compress(head + numbers.tobytes()))
    assert np.array_equal(read(tmp_path / "file.gz"), numbers)


def test_processor_time_is_that_of_children_too() -> None:
    before = cpu_seconds()
    busy = "import time\nwhile time.process_time() < 0.2: pass\nprint(1, flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", busy], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it still lives, and has worked
        assert cpu_seconds() - before >= 0.15
        child.communicate(b"\n")


def test_a_report_leaves_out_the_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(marks=[(0, 0), (5, 4), (6, 4.5), (8, 5)])
    asked = argparse.Namespace(workload="mlp", device="cpu", warm_up=1, rounds=2)
    report("mine", clock, asked, 0.5, {"python": "3"})
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["milliseconds"] == [1000, 2000]
    assert said["cpu_seconds"] == [0.5, 0.5]
    assert said["first_round_seconds"] == 5
    assert said["rounds"] == 3


def run(runner: str, times: list[float], device: str = "cpu", **more: Any) -> dict[str, Any]:
    return {
        "runner": runner,
        "framework": f"the {runner}",
        "workload": "mlp",
        "device": device,
        "hardware": "a machine",
        "date": "2026-01-02",
        "milliseconds": times,
        "cpu_seconds": [value / 1e3 for value in times],
        "first_round_seconds": 1.0,
        "accuracy": 0.7,
        "rounds": 4,
        "versions": {"python": "3"},
        **more,
    }


def test_what_is_measured_anew_replaces_what_was() -> None:
    failed = {"runner": "pfl", "workload": "mlp", "device": "cpu", "failed": "no module"}
    old = [run("sartor", [1.0]), run("sartor", [2.0], "cuda"), failed]
    new = [run("sartor", [3.0]), run("sartor", [4.0]), {**failed, "failed": "another"}]
    assert measure.merged(old, new) == [old[1], *new]
    assert measure.merged(old, [{**failed, "runner": "sartor"}])[:3] == old  # a failure replaces no figure


def test_rows_are_medians_of_all_turns_the_least_first() -> None:
    runs = [
        run("jax", [30.0]),
        run("sartor", [10.0, 20.0]),
        run("sartor", [60.0]),
        run("sartor", [1.0], "cuda"),
    ]
    rows = draw.summaries(runs, "mlp", "cpu")
    assert [row["framework"] for row in rows] == ["the sartor", "the jax"]
    assert rows[0]["milliseconds"] == 20
    assert rows[0]["timed"] == 3
    assert "| the sartor | 20 | 15 to 40 | 70.0 % |" in draw.table(rows, "cpu")
    assert "| the sartor | 20 | 15 to 40 | 70.0 % | 1 |" in draw.table(rows, "cuda")


def test_on_a_cpu_the_processor_counts_and_on_a_gpu_the_clock() -> None:
    unlike = {"milliseconds": [70.0], "cpu_seconds": [0.02]}
    assert draw.summary([run("sartor", [1.0], **unlike)])["milliseconds"] == 20
    assert draw.summary([run("sartor", [1.0], "cuda", **unlike)])["milliseconds"] == 70


def test_a_page_is_filled_once_and_stays_filled() -> None:
    page = "before\n<!-- cpu -->\n\n<!-- end of cpu -->\nafter\n<!-- cuda -->\nkept\n<!-- end of cuda -->\n"
    made = draw.blocks([run("sartor", [10.0])])
    once = draw.filled(page, made)
    assert list(made) == ["cpu"]
    assert "| the sartor |" in once
    assert "kept" in once
    assert "a machine, 2026-01-02; 1 rounds timed, accuracy after 4 rounds." in once
    assert draw.filled(once, made) == once


def test_the_page_shows_what_was_measured() -> None:
    runs = json.loads(measure.RESULT.read_text(encoding="utf-8"))
    page = draw.PAGE.read_text(encoding="utf-8")
    assert draw.filled(page, draw.blocks(runs)) == page


def test_a_framework_that_fails_says_why(tmp_path: Path) -> None:
    asked = SimpleNamespace(python=[], device="cpu", rounds=1, warm_up=0, pfllib=None)
    said = measure.turn(measure.Runner("by_nobody"), "mlp", asked, [0], 60.0)
    assert "by_nobody" in said["failed"]


def test_time_that_is_over_is_told() -> None:
    asked = SimpleNamespace(python=[], device="cpu", rounds=1, warm_up=0, pfllib=None)
    begin = time.monotonic()
    assert measure.turn(measure.Runner("by_sartor"), "mlp", asked, [0], 0.05) == {
        "failed": "no time was left"
    }
    assert time.monotonic() - begin < 10
