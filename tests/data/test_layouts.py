"""Readers of layouts that people have: texts in tables, LEAF, Hugging Face's data sets, four hospitals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset
from typer.testing import CliRunner

import sartor
from owned import forgetful
from sartor.commands.main import app
from sartor.data import (
    Source,
    encoded,
    from_columns,
    from_heart_disease,
    from_leaf,
    from_table,
    source_from_table,
)
from sartor.data.leaf import LETTERS
from sartor.data.named import read_data
from sartor.data.preprocessing import Preprocessing
from sartor.data.readers import read_table
from sartor.data.settings import Data
from sartor.data.texts import TextColumn
from sartor.errors import DataError, SartorError, SettingError
from sartor.runs.newcomers import evaluate_run

__all__ = ["forgetful"]
NEWS = "kind,site,text\n" + "".join(
    f"{kind},{site},{text}\n"
    for site in ("north", "south")
    for kind, text in [("sport", '"A goal, a goal"'), ("money", "the bank of goals"), ("sport", "a cup")] * 4
)


def call(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


# Texts -----------------------------------------------------------------------------------------------------


def test_words_are_numbered_by_how_often_they_occur() -> None:
    x = encoded(["b a b", "a b c!"], "words", length=5)
    assert x.tolist() == [[2, 3, 2, 0, 0], [3, 2, 5, 4, 0]]  # b, a, then ! and c as in the alphabet
    assert encoded(["b a b", "a b c!"], "words", length=2).tolist() == [[2, 3], [3, 2]]
    assert encoded(["b a b", "a b c"], vocabulary=3, length=3).tolist() == [[2, 1, 2], [1, 2, 1]]
    assert encoded(["aB", "B"], "characters", length=2).tolist() == [[3, 2], [2, 0]]


def test_a_vocabulary_is_of_the_training_rows(tmp_path: Path) -> None:
    file = tmp_path / "notes.csv"
    file.write_text("who,set,text,y\nn,train,a b,0\nn,test,a c,1\nn,train,a a,1\n")
    data = from_table(file, "who", "y", text_column="text", split_column="set", length=2)
    assert data.train.x.tolist() == [[2, 3], [2, 2]]
    assert data.test.x.tolist() == [[2, 1]]
    assert data.preprocessing.transform({"text": ["b c a"]}).tolist() == [[3, 1]]
    again = Preprocessing.from_mapping(json.loads(json.dumps(data.preprocessing.to_mapping())))
    assert again.transform({"text": ["b c a"]}).tolist() == [[3, 1]]


def test_a_function_that_is_given_in_python_is_not_stored() -> None:
    stored = TextColumn("text", str.split, 3, 9).to_mapping()
    with pytest.raises(DataError, match="given in Python"):
        TextColumn.from_mapping(stored)


def test_hashed_words_have_the_same_number_wherever_they_are() -> None:
    here, there = encoded(["bank goal"], "hashed", vocabulary=50), encoded(["goal"], "hashed", vocabulary=50)
    assert int(here[0, 1]) == int(there[0, 0])
    assert int(here.max()) < 50
    assert int(here[0, 0]) >= 2


def test_an_own_function_gives_numbers_texts_or_arrays_by_name() -> None:
    assert encoded(["ab", "b"], lambda text: [ord(c) for c in text], length=2).tolist() == [[97, 98], [98, 0]]
    assert encoded(["a b"], lambda text: text.split(), length=2).tolist() == [[2, 3]]
    named = encoded(["ab", "b"], lambda t: {"input_ids": [7] * len(t), "mask": [1] * len(t)}, length=2)
    assert {key: value.tolist() for key, value in named.items()} == {
        "input_ids": [[7, 7], [7, 0]],
        "mask": [[1, 1], [1, 0]],
    }


def fails(text: str) -> list[int]:
    raise KeyError(text)


@pytest.mark.parametrize(
    ("texts", "tokens", "said"),
    [
        (["a", " "], "words", "row 1: the text has no token"),
        (["a", "b"], lambda text: [-1], "row 0: text: tokens: gives"),
        (["a"], lambda text: 5, "expected a list of whole numbers"),
        (["a"], fails, "row 0: text: tokens fails: KeyError"),
    ],
)
def test_a_text_without_tokens_is_named(texts: list[str], tokens: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        encoded(texts, tokens)


def test_an_unknown_way_to_cut_texts_is_one_message() -> None:
    with pytest.raises(SettingError, match="one of words, characters, hashed"):
        encoded(["a"], "word")


def test_a_table_of_texts_has_clients_or_is_divided(tmp_path: Path) -> None:
    file = tmp_path / "news.csv"
    file.write_text(NEWS)
    data = from_table(file, "site", "kind", text_column="text", length=6)
    assert (data.names, data.labels) == (("north", "south"), ("money", "sport"))
    assert data.train.x.dtype == torch.int64
    assert data.train.x.shape[1:] == (6,)
    source = source_from_table(file, "kind", text_column="text", length=6)
    assert (source.sizes, source.classes, source.names) == ((24, 0), 2, ("money", "sport"))
    assert source.train_y.tolist()[:3] == [1, 0, 1]
    numbered = source_from_table(file, "kind", text_column="text", labels=["sport", "money"])
    assert numbered.train_y.tolist()[:3] == [0, 1, 0]
    with pytest.raises(DataError, match="row 1 has the label 'money', not among the classes"):
        source_from_table(file, "kind", text_column="text", labels=["sport"])


@pytest.mark.usefixtures("forgetful")
def test_texts_are_trained_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("news.csv").write_text(NEWS)
    Path("mine.py").write_text("def letters(text):\n    return [ord(letter) for letter in text]\n")
    own = [
        "data.path=news.csv",
        "data.label_column=kind",
        "data.text_column=text",
        "data.tokens=mine.py:letters",
    ]
    model = ["model.name=lstm", "model.width=3", "model.hidden=4", "data.length=5"]
    small = [*own, *model, "rounds=1", "partition.name=iid", "data.clients=3", "--out", "run"]
    done = call("run", "fedavg", *small)
    assert done.exit_code == 0, done.stderr
    told = Path("run/config.toml").read_text()
    assert "mine.py:letters" in told
    assert 'labels = ["money", "sport"]' in told
    assert call("resume", "run", "--rounds", "2").exit_code == 0
    shown = call("data", "news.csv", *own[1:], "data.length=5", "partition.name=iid", "data.clients=3")
    assert shown.exit_code == 0, shown.stderr
    assert "news.csv: 3 clients" in shown.stdout


def test_texts_of_newcomers_are_numbered_as_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    head, *rows = NEWS.replace(",text\n", ",set,text\n", 1).splitlines()
    rows = [
        ",".join([*row.split(",")[:2], ("train", "test")[place % 2], *row.split(",")[2:]])
        for place, row in enumerate(rows)
    ]
    Path("news.csv").write_text("\n".join([head, *rows]) + "\n")
    own = ["data.path=news.csv", "data.label_column=kind", "data.client_column=site", "data.split_column=set"]
    model = ["data.text_column=text", "data.length=6", "model.name=lstm", "model.width=3", "model.hidden=4"]
    assert call("run", "fedavg", *own, *model, "hyper.lr=0.5", "rounds=3", "--out", "run").exit_code == 0
    own_rows = evaluate_run("run")["last"]["shared_local"]
    # The same texts to test on, and training rows by which other words would be frequent.
    tests = [row for row in rows if ",test," in row]
    others = [f"sport,{site},train,{' '.join(f'word{k}' for k in range(40))}" for site in ("north", "south")]
    Path("new.csv").write_text("\n".join([head, *others, *tests]) + "\n")
    assert evaluate_run("run", data="new.csv")["last"]["shared_local"] == own_rows
    options: dict[str, Any] = {"text_column": "text", "split_column": "set", "length": 6}
    mine = from_table("news.csv", "site", "kind", **options)
    alike = from_table("new.csv", "site", "kind", **options, tokens=mine.preprocessing.table)
    assert evaluate_run("run", data=alike)["last"]["shared_local"] == own_rows
    with pytest.raises(SettingError, match="numbered by another vocabulary"):
        evaluate_run("run", data=from_table("new.csv", "site", "kind", **options))


def test_texts_that_are_not_there_are_not_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("news.csv").write_text(NEWS)
    data = from_table("news.csv", "site", "kind", text_column="text", length=4)
    read = data.preprocessing.transform
    with pytest.raises(DataError, match="no column text; did you mean txt"):
        read({"txt": ["a goal"]})
    with pytest.raises(DataError, match=r"column text has no value in row 1 \(first row is 0\)"):
        read({"text": ["a goal", None]})
    assert read({"text": []}).shape == (0, 4)
    model = {"name": "lstm", "width": 3, "hidden": 4}
    run = sartor.run("fedavg", data=data, experiment={"model": model}, rounds=1, out="run")
    Path("new.csv").write_text("id,text\n1,1.50\n2,2.5\n")  # a text, though all of them look like numbers
    assert call("predict", "run", "new.csv").exit_code == 0
    scored = read_table(Path("scored.csv"))["probability_money"].to_pylist()
    assert scored == run.predict(None, {"text": ["1.50", "2.5"]})["probability_money"].tolist()


WRONG_TABLES = [
    (["data.path=none.csv"], "none.csv': no such file or folder"),
    (["data.path=news.csv"], "data.label_column"),
    (["data.path=news.csv", "data.label_column=kind", "data.text_column=txt"], "did you mean text?"),
    (["data.path=news.csv", "data.label_column=kind", "data.length=3"], "data.length: of no text"),
    (
        ["data.path=news.csv", "data.label_column=kind", "data.text_column=text", "data.tokens=word"],
        "one of words",
    ),
    (["data.text_column=text"], "data.text_column: only for own data"),
]


@pytest.mark.parametrize(("words", "said"), WRONG_TABLES)
def test_what_is_wrong_with_a_table_is_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("news.csv").write_text(NEWS)
    done = call("run", "fedavg", *words, "rounds=1")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr


# LEAF ------------------------------------------------------------------------------------------------------


def leaf(folder: Path, users: dict[str, tuple[list[Any], list[Any]]]) -> Path:
    """A file as LEAF's preprocessing writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    held = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    content = {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": held}
    (folder / "all_data_0.json").write_text(json.dumps(content))
    return folder


PLAYS = {
    "HAMLET_PRINCE": (["To be, or", "not to be"], ["n", "t"]),
    "LEAR_KING": (["Blow wind", "rage blow", "you cata~"], ["s", "!", "r"]),
}


def test_roles_of_shakespeare_are_clients(tmp_path: Path) -> None:
    leaf(tmp_path / "data" / "train", PLAYS)
    leaf(tmp_path / "data" / "test", {name: (x[:1], y[:1]) for name, (x, y) in PLAYS.items()})
    data = from_leaf(tmp_path / "data")
    assert data.names == tuple(PLAYS)
    assert (data.train.count.tolist(), data.test.count.tolist()) == ([2, 3], [1, 1])
    x, y = data.train.of(0)
    assert [LETTERS[token - 2] for token in x[0].tolist()] == list("To be, or")
    assert LETTERS[int(y[0]) - 2] == "n"
    assert int(data.train.of(1)[0][2, -1]) == 1  # ~ is none of LEAF's characters
    assert data.classes == len(LETTERS) + 2 == 82


def test_writers_of_femnist_are_clients(tmp_path: Path) -> None:
    images = np.linspace(0, 1, 784).round(3).tolist()
    users = {f"f000{k}_0{k}": ([images] * (2 + k), [k, 61, 3][: 2 + k]) for k in range(2)}
    data = from_leaf(leaf(tmp_path / "femnist", users), test_fraction=0.4)
    assert data.train.x.shape[1:] == (1, 28, 28)
    assert float(data.train.x[0, 0, 1, 0]) == pytest.approx(images[28])
    assert (data.names, data.classes) == (("f0000_00", "f0001_01"), 62)
    named = read_data(Data(path=str(tmp_path / "femnist")), seed=0)
    assert named.hash == from_leaf(tmp_path / "femnist").hash


WRONG_LEAVES: list[tuple[Any, str]] = [
    ({"a": (["xy"], [])}, "user 'a': 1 samples in x but 0 labels"),
    ({"a": (["xy", "xy"], ["a", "bc"])}, r"user 'a': y\[1\] is 'bc'"),
    ({"a": ([[1, 2], [1, 2]], [0, 1])}, "neither texts"),
    ({"a": ([["x"] * 784] * 2, [0, 1])}, "a pixel is no number"),
    ({"a": (["x"], ["y"])}, "no user has 2 samples"),
]


@pytest.mark.parametrize(("users", "said"), WRONG_LEAVES)
def test_what_is_wrong_with_a_leaf_names_file_and_user(users: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said) as found:
        from_leaf(leaf(tmp_path / "leaf", users))
    assert "leaf" in str(found.value)


def test_a_file_that_is_not_leafs_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    file.write_text('{"users": ["a"],\n "user_data": {]}')
    with pytest.raises(DataError, match=r"some.json: line 2: is no JSON"):
        from_leaf(file)
    file.write_text("[1]")
    with pytest.raises(DataError, match="not LEAF's JSON"):
        from_leaf(file)
    leaf(tmp_path / "both" / "train", PLAYS)
    leaf(tmp_path / "both" / "test", {"LEAR_FOOL": (["x"], ["y"])})
    with pytest.raises(DataError, match="user 'LEAR_FOOL' has no training samples"):
        from_leaf(tmp_path / "both")


# Data sets in memory ---------------------------------------------------------------------------------------


@pytest.fixture
def hugging_face() -> Callable[..., Any]:
    return pytest.importorskip("datasets").Dataset.from_dict  # type: ignore[no-any-return]


def test_columns_of_a_hugging_face_data_set(hugging_face: Callable[..., Any]) -> None:
    rows = {
        "text": ["a goal", "the bank", "a cup", "money"] * 3,
        "label": [0, 1, 0, 1] * 3,
        "who": ["n", "s"] * 6,
    }
    data = from_columns(hugging_face(rows), "text", "label", client="who", length=3)
    assert (data.names, data.classes, data.train.x.dtype) == (("n", "s"), 2, torch.int64)
    images = np.arange(8 * 4 * 4 * 3, dtype=np.uint8).reshape(8, 4, 4, 3)
    pictures = [pytest.importorskip("PIL.Image").fromarray(image) for image in images]
    held = {"img": pictures, "age": np.arange(8, dtype=np.float32), "label": [0, 1] * 4}
    data = from_columns(hugging_face(held), ["img", "age"], "label", partition="iid", clients=2)
    assert data.train.x["img"].shape[1:] == (3, 4, 4)
    assert float(data.train.x["img"].max()) <= 1
    assert data.train.x["age"].shape[1:] == ()
    divided = from_columns(
        hugging_face(rows),
        "text",
        "label",
        partition="iid",
        clients=2,
        test=hugging_face(rows),
        tokens="hashed",
    )
    assert len(divided.pooled_y) == 12


def test_what_is_wrong_with_columns_is_one_message(hugging_face: Callable[..., Any]) -> None:
    made = hugging_face({"text": ["a", "b"], "label": [0, 1]})
    with pytest.raises(SartorError, match="did you mean label"):
        from_columns(made, "text", "labl", partition="iid", clients=1)
    with pytest.raises(DataError, match="say whose rows"):
        from_columns(made, "text", "label")
    with pytest.raises(DataError, match="expected one split"):
        from_columns({"train": made}, "text", "label", client="text")
    with pytest.raises(DataError, match="numbered apart"):
        from_columns(made, "text", "label", partition="iid", clients=1, test=made)


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, place: int) -> tuple[dict[str, Any], int]:
        return {"numbers": np.float32([place, 1]), "categories": np.int64([place % 3])}, place % 2


def test_a_torch_data_set_is_divided_by_a_run() -> None:
    own = {"data": Pairs(), "partition": {"name": "iid"}, "clients": 4, "rounds": 1, "store": False}
    result = sartor.run("fedavg", model="table", **own)
    assert result.summary["clients"] == 4
    again = sartor.run("fedavg", model="table", **{**own, "seed": 1})
    assert again.summary["partition_hash"] != result.summary["partition_hash"]
    source = Source("s", torch.randn(30, 3), torch.arange(30) % 2, torch.randn(6, 3), torch.arange(6) % 2, 2)
    result = sartor.run("fedavg", data=source, clients=3, rounds=1, store=False)
    assert (result.summary["clients"], result.summary["data"]) == (3, "s")


@pytest.mark.usefixtures("forgetful")
def test_a_function_may_give_a_torch_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import torch\ndef load():\n"
        "    return torch.utils.data.TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)\n"
    )
    shown = call("data", "mine.py:load", "--clients", "4", "--partition", "iid", "--json")
    assert len(json.loads(shown.stdout)["clients"]) == 4
    assert len(TensorDataset(torch.zeros(2))) == 2


# Four hospitals --------------------------------------------------------------------------------------------

PATIENTS = [
    "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0",
    "67.0,1.0,4.0,160.0,286.0,0.0,0.0,108.0,1.0,1.5,2.0,3.0,3.0,2",
    "28,1,2,130,132,0,2,185,0,0,?,?,?,0",
    "29,1,2,120,?,0,0,160,0,0,?,?,?,0",
]


def hospitals(folder: Path, lines: list[str] = PATIENTS) -> Path:
    folder.mkdir(parents=True)
    for word in ("cleveland", "hungarian", "switzerland", "va"):
        (folder / f"processed.{word}.data").write_text("\n".join(lines) + "\n")
    return folder


def test_four_hospitals_are_clients(tmp_path: Path) -> None:
    data = from_heart_disease(hospitals(tmp_path / "heart-disease"))
    assert data.names == ("Cleveland", "Hungary", "Switzerland", "Long Beach")
    assert (data.classes, data.train.x.shape[1:]) == (2, (13,))
    assert (data.train.count + data.test.count).tolist() == [3] * 4  # one lacks a value that is used
    rows = torch.cat([data.train.of(0)[0], data.test.of(0)[0]])
    second = rows[rows[:, 0] == 67][0].tolist()
    assert second == pytest.approx(
        [67, 1, 160, 286, 0, 108, 1, 1.5, 0, 0, 1, 0, 0]
    )  # pain of the fourth kind
    named = read_data(Data(name="heart-disease", folder=str(tmp_path)), seed=0)
    assert named.names == data.names


def test_files_of_hospitals_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"processed\.cleveland\.data.*archive\.ics\.uci"):
        from_heart_disease(tmp_path)
    with pytest.raises(DataError, match=r"cleveland\.data: line 2: 3 columns"):
        from_heart_disease(hospitals(tmp_path / "a", [PATIENTS[0], "1,2,3"]))
    with pytest.raises(DataError, match="line 1: has a value that is no number"):
        from_heart_disease(hospitals(tmp_path / "b", [PATIENTS[0].replace("63.0", "x")]))
    with pytest.raises(DataError, match="line 1: column 2 is 7"):
        from_heart_disease(hospitals(tmp_path / "c", [PATIENTS[0].replace("1.0,1.0", "1.0,7", 1)]))
