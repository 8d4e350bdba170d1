"""A model in use: what a run's folder predicts, and what is exported of it, is what the run's model says."""

from __future__ import annotations

import json
import sys
from csv import reader as csv_rows
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
import torch
from pyarrow import csv, parquet
from torch import nn
from typer.testing import CliRunner

import sartor
from sartor.commands.main import app
from sartor.data.preprocessing import Preprocessing
from sartor.data.schema import read_columns
from sartor.data.tables import SchemaColumns
from sartor.errors import DataError, SartorError
from sartor.runs.predictor import _check_equal, load_predictor
from sartor.runs.result import read_result


def table(rows: int = 60, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    age, bmi = random.integers(20, 90, rows), random.normal(25, 3, rows)
    return {
        "hospital": np.array(["Oslo", "Bergen", "Narvik"])[np.arange(rows) % 3],
        "age": age,
        "bmi": bmi,
        "state": np.where(age + bmi > 80, "ill", "well"),
    }


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[sartor.Result, Path]:
    folder = tmp_path_factory.mktemp("hospitals")
    csv.write_csv(arrow.table(table()), folder / "all.csv")
    data = {"path": str(folder / "all.csv"), "client_column": "hospital", "label_column": "state"}
    result = sartor.run("ditto", experiment={"data": data}, rounds=2, out=folder / "run")
    (folder / "all.csv").unlink()  # what follows does without the data
    return result, folder


def said(*words: Any) -> str:
    ran = CliRunner().invoke(app, list(map(str, words)))
    assert ran.exit_code == 0, ran.output
    return ran.output


def refused(*words: Any) -> str:
    ran = CliRunner().invoke(app, list(map(str, words)))
    assert ran.exit_code == 2, ran.output
    assert len(ran.stderr.strip().splitlines()) == 1
    return ran.stderr


def same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 0.0) -> None:
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        if np.asarray(values).dtype.kind == "f":
            assert np.abs(np.asarray(found[name]) - values).max() <= tolerance, name
        else:
            assert np.asarray(found[name]).tolist() == values.tolist(), name


def test_predictions_are_the_personal_models_of_normalised_rows(stored: tuple[sartor.Result, Path]) -> None:
    result, folder = stored
    new = table(30, seed=1)
    moments = result.signature.preprocessing.moments["x"]
    x = torch.tensor(np.column_stack([new["age"], new["bmi"]]), dtype=torch.float32)
    deviation = (moments.squares / moments.number).sqrt()
    scores = result.model("Oslo")(((x - moments.mean) / deviation).float()).detach()
    found = result.predict("Oslo", new)
    wanted = np.array(["ill", "well"])[scores.argmax(1).numpy()]
    assert found["prediction"].tolist() == wanted.tolist()
    assert np.allclose(found["probability_ill"], scores.double().softmax(1)[:, 0].numpy(), atol=1e-6)
    assert np.allclose(found["probability_ill"] + found["probability_well"], 1)
    same(read_result(folder / "run").predict("Oslo", new), found)
    # Columns go by name, wherever they stand, and more of them do not harm.
    turned = {name: new[name] for name in reversed(new)}
    same(result.predict("Oslo", arrow.table({**turned, "other": ["?"] * 30})), found)
    assert found["probability_ill"].tolist() != result.predict("Bergen", new)["probability_ill"].tolist()
    shared = result.predict(None, new)
    assert shared["probability_ill"].tolist() != found["probability_ill"].tolist()
    assert len(result.predict("Oslo", {name: values[:0] for name, values in new.items()})["prediction"]) == 0


@pytest.mark.parametrize("format", ["torch", "onnx"])
def test_an_exported_model_says_the_same_and_has_all_with_it(
    stored: tuple[sartor.Result, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    result, folder = stored
    new = table(30, seed=1)
    monkeypatch.chdir(tmp_path)
    said("export", folder / "run", "--client", "Oslo", "--format", format)
    (path,) = [path for path in tmp_path.iterdir() if path.suffix != ".md"]
    assert path.name == {"torch": "Oslo.pt2", "onnx": "Oslo.onnx"}[format]
    loaded = load_predictor(path)
    wanted = result.predict("Oslo", new)
    same(loaded.predict(new), wanted, 0 if format == "torch" else 1e-5)
    first = {name: values[:1] for name, values in new.items()}
    same(loaded.predict(first), result.predict("Oslo", first), 0 if format == "torch" else 1e-5)
    card = loaded.card
    assert (card["client"], card["model"], card["method"]) == ("Oslo", "personal", "ditto")
    assert card["data"]["columns"] == ["age", "bmi"]
    assert card["data"]["labels"] == ["ill", "well"]
    own = next(row for row in card["clients"] if row["client"] == "Oslo")
    assert card["data"]["training samples"] == own["n_train"] == 16
    assert card["metrics"]["personal_local"]["accuracy"] == result.summary["accuracy"]["personal_local"]
    assert card["settings"]["rounds"] == 2
    text = path.with_suffix(".md").read_text()
    assert text.startswith("# Model of Oslo")
    assert "ditto, 2 rounds" in text
    if format == "torch":  # it stands alone: PyTorch itself reads it
        program = torch.export.load(path)
        assert program.module()(torch.zeros(4, 2)).shape == (4, 2)
    csv.write_csv(arrow.table(new), "new.csv")
    assert "30 rows" in said("predict", path, "new.csv", "--out", "scored.csv")
    scored = csv.read_csv("scored.csv").to_pydict()
    assert scored["prediction"] == wanted["prediction"].tolist()
    assert scored["age"] == new["age"].tolist()
    with pytest.raises(SartorError, match="cannot be exported again"):
        loaded.save(tmp_path / "again.pt2")


def test_rows_of_a_file_are_predicted(stored: tuple[sartor.Result, Path], tmp_path: Path) -> None:
    result, folder = stored
    new = table(9, seed=2)
    wanted = result.predict("Narvik", new)
    parquet.write_table(arrow.table(new), tmp_path / "new.parquet")
    for ending in ("csv", "parquet", "npz"):
        out = tmp_path / f"scored.{ending}"
        said("predict", folder / "run", tmp_path / "new.parquet", "--client", "Narvik", "--out", out)
    assert (
        csv.read_csv(tmp_path / "scored.csv").column("prediction").to_pylist()
        == wanted["prediction"].tolist()
    )
    found = parquet.read_table(tmp_path / "scored.parquet")
    assert found.column_names == [*new, *wanted]
    same(dict(np.load(tmp_path / "scored.npz")), wanted)


def test_columns_of_a_file_are_written_as_they_stand(
    stored: tuple[sartor.Result, Path], tmp_path: Path
) -> None:
    _, folder = stored
    rows = ["patient,age,bmi,country,well", "007,81,24.50,NA,True", "010,33,21,,false"]
    (tmp_path / "new.csv").write_text("\n".join(rows) + "\n")
    said("predict", folder / "run", tmp_path / "new.csv", "--out", tmp_path / "scored.csv")
    with (tmp_path / "scored.csv").open(newline="") as file:
        found = [row[:5] for row in csv_rows(file)]
    assert found == [row.split(",") for row in rows]


def test_what_cannot_be_predicted_is_one_line(stored: tuple[sartor.Result, Path], tmp_path: Path) -> None:
    _, folder = stored
    run, new = folder / "run", tmp_path / "new.csv"
    csv.write_csv(arrow.table(table(4)), new)
    assert "known: Bergen, Narvik, Oslo" in refused("export", run, "--client", "Ålesund")
    assert "did you mean Oslo?" in refused("predict", run, new, "--client", "oslo")
    assert "no such file" in refused("predict", run, tmp_path / "none.csv")
    assert "give a run folder, or --state" in refused("export")
    assert "ends in .csv" in refused("predict", run, new, "--out", tmp_path / "scored.txt")
    short = {name: values for name, values in table(4).items() if name != "bmi"}
    csv.write_csv(arrow.table(short), tmp_path / "short.csv")
    assert "no column bmi" in refused("predict", run, tmp_path / "short.csv")
    csv.write_csv(arrow.table({**table(4), "prediction": [1] * 4}), tmp_path / "twice.csv")
    assert "has a column prediction already" in refused("predict", run, tmp_path / "twice.csv")
    csv.write_csv(arrow.table({**table(4), "age": ["young"] * 4}), tmp_path / "texts.csv")
    assert "column age does not hold numbers" in refused("predict", run, tmp_path / "texts.csv")
    csv.write_csv(arrow.table({**table(4), "age": [1, None, 3, 4]}), tmp_path / "holes.csv")
    assert "column age has no value in row 1" in refused("predict", run, tmp_path / "holes.csv")
    (tmp_path / "damaged.pt2").write_bytes(b"PK nothing")
    assert "cannot be read as a model" in refused("predict", tmp_path / "damaged.pt2", new)
    (tmp_path / "damaged.onnx").write_bytes(b"nothing")
    assert "cannot be read as a model" in refused("predict", tmp_path / "damaged.onnx", new)
    assert not (tmp_path / "scored.csv").exists()


def test_gaps_of_a_data_frame_are_gaps_and_columns_that_are_not_needed_are_left_alone() -> None:
    schema = read_columns(
        {"ward": {"kind": "category", "values": ["a", "b"], "missing": "place"}, "age": {"scale": "none"}}
    )
    preprocessing = Preprocessing(SchemaColumns(schema))
    wanted = preprocessing.transform({"ward": ["a", None], "age": [1.0, 2.0]})
    # A data frame has nan among texts, and columns of anything.
    held = {"ward": np.array(["a", np.nan], object), "age": [1.0, 2.0], "other": np.array([1, "x"], object)}
    assert torch.equal(preprocessing.transform(held), wanted)
    with pytest.raises(DataError, match="column age of the table cannot be read"):
        preprocessing.transform({**held, "age": np.array([1, "x"], object)})
    with pytest.raises(DataError, match="column age of the table has 1 rows, column ward has 2"):
        preprocessing.transform({**held, "age": [1.0]})


@pytest.mark.parametrize("method", ["fedrod", "fedproto"])
def test_a_model_that_is_more_than_a_network_is_refused_in_words(method: str) -> None:
    random = torch.Generator().manual_seed(0)
    data = {name: (torch.randn(20, 3, generator=random), torch.arange(20) % 2) for name in "ab"}
    result = sartor.run(method, model="mlp", data=data, rounds=1, store=False)
    with pytest.raises(SartorError, match="more than the network's weights") as refusal:
        result.predict("a", data["a"][0])
    assert ("without a client the shared one" in str(refusal.value)) == (result.w is not None)


@pytest.mark.parametrize("ending", ["", "pt2", "onnx"])
def test_tokens_that_the_model_does_not_know_are_refused(ending: str, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 9, (20, 4))
    model = {"name": "lstm", "width": 2, "hidden": 3}
    run = sartor.run(
        "fedavg", data={"a": (tokens, np.arange(20) % 2)}, experiment={"model": model}, rounds=1, store=False
    )
    predictor = load_predictor(run.export(None, tmp_path / f"m.{ending}")) if ending else run.predictor()
    with pytest.raises(SartorError, match="it knows no tokens or categories beyond those"):
        predictor.predict(tokens + 9)


def test_what_is_written_follows_from_the_ending_of_its_name(
    stored: tuple[sartor.Result, Path], tmp_path: Path
) -> None:
    run = stored[1] / "run"
    for words, written in (
        (["--out", "a.onnx"], "a.onnx"),
        (["--out", "a.pt2"], "a.pt2"),
        (["--out", "a"], "a.pt2"),
        (["--out", "a.onnx", "--format", "torch"], "a.onnx.pt2"),
    ):
        words[1] = str(tmp_path / words[1])
        assert f"model: {tmp_path / written}\n" in said("export", run, "--client", "Oslo", *words)
        load_predictor(tmp_path / written)


def test_onnx_that_is_not_installed_is_named(
    stored: tuple[sartor.Result, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    told = refused("export", stored[1] / "run", "--format", "onnx", "--out", tmp_path / "model.onnx")
    assert "pip install 'sartor[onnx]'" in told
    assert not list(tmp_path.iterdir())


def test_an_onnx_model_that_computes_something_else_is_refused() -> None:
    wanted = torch.tensor([[1.0, -2.0]])
    _check_equal(wanted + 1e-6, wanted)
    for found in (wanted + 0.01, wanted[:, :1], wanted * torch.nan):
        with pytest.raises(SartorError, match="does not compute the same in ONNX"):
            _check_equal(found, wanted)


def test_numbers_and_labels_are_predicted() -> None:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    numbers = {"a": (x, x @ torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])), "b": (x, x[:, :2])}
    result = sartor.run("fedavg", data=numbers, objective="regression", rounds=1, store=False)
    found = result.predict("a", x)
    assert list(found) == ["prediction_0", "prediction_1"]
    outputs = result.model()(x).detach().double().numpy()
    assert np.array_equal(np.column_stack(list(found.values())), outputs)
    one = {"a": (x, x[:, 0]), "b": (x, x[:, 1])}
    assert list(
        sartor.run("fedavg", data=one, objective="regression", rounds=1, store=False).predict("a", x)
    ) == ["prediction"]
    several = {"a": (x, (x > 0).long()), "b": (x, (x < 0).long())}
    result = sartor.run("separate", data=several, objective="multi-label", rounds=1, store=False)
    found = result.predict("b", x)
    outputs = result.model("b")(x).detach()
    assert list(found) == [f"{what}_{k}" for what in ("prediction", "probability") for k in range(3)]
    assert np.array_equal(found["prediction_2"], (outputs[:, 2] > 0).long().numpy())
    assert np.allclose(found["probability_1"], outputs[:, 1].double().sigmoid().numpy())


class Both(nn.Module):
    """Takes words and a number by name."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(5, 4), nn.Linear(5, 3)

    def forward(self, words: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.words(words).mean(1), weight[:, None]], 1))


def test_samples_of_several_arrays_and_own_modules_are_exported(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    x = {"words": torch.randint(0, 5, (20, 6), generator=random), "weight": torch.randn(20, generator=random)}
    data = {"a": (x, torch.arange(20) % 3), "b": (x, torch.arange(20) % 3)}
    result = sartor.run("fedper", model=Both(), head="out", data=data, rounds=1, out=tmp_path / "run")
    path = result.export("b", tmp_path / "b")
    same(load_predictor(path).predict(x), result.predict("b", x))
    told = refused("export", tmp_path / "run", "--client", "b")
    assert "was given in Python" in told
    with pytest.raises(SartorError, match=r"samples of .*words"):
        result.predict("b", {"words": x["words"][:, :2], "weight": x["weight"]})
    np.savez(tmp_path / "new.npz", **{"x.words": x["words"].numpy(), "x.weight": x["weight"].numpy()})
    said("predict", path, tmp_path / "new.npz", "--out", tmp_path / "out.csv")
    assert csv.read_csv(tmp_path / "out.csv").num_rows == 20
    csv.write_csv(arrow.table({"a": [1]}), tmp_path / "new.csv")
    assert "trained on arrays" in refused("predict", path, tmp_path / "new.csv")


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "ma-fsvrg", "ifca", "heterofl"])
def test_a_folder_gives_the_models_of_the_run(method: str, tmp_path: Path) -> None:
    entries = [{"name": "mlp", "hidden": 16, "every": 2}] if method == "heterofl" else None
    model = {"name": "cnn"} if method == "fedbn" else {"name": "mlp", "hidden": 32}
    result = sartor.run(
        method, experiment={"model": model}, models=entries, clients=4, rounds=1, out=tmp_path / "run"
    )
    again = read_result(tmp_path / "run")
    x = torch.rand(3, 64) if model["name"] == "mlp" else torch.rand(3, 1, 8, 8)
    x = x.reshape(3, *result.signature.x["x"][1])
    for client in (None, "2"):
        if client is None and method == "heterofl":
            continue
        same(again.predict(client, x), result.predict(client, x))


def test_a_run_that_has_not_ended_exports_nothing(tmp_path: Path) -> None:
    sartor.run("fedavg", clients=3, rounds=1, out=tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    assert "has not finished" in refused("export", tmp_path / "run")


def test_a_damaged_signature_is_named(tmp_path: Path) -> None:
    sartor.run("fedavg", clients=3, rounds=1, out=tmp_path / "run")
    path = tmp_path / "run" / "signature.json"
    stored = json.loads(path.read_text())
    del stored["preprocessing"]["moments"]
    path.write_text(json.dumps(stored))
    assert "signature.json: damaged" in refused("export", tmp_path / "run")
