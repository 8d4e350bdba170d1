"""Text labels are numbered alike everywhere: in every file, at every node, and after the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from flower_grid import HereGrid
from flower_processes import Child, Nursery, free_port
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import sartor
from sartor.commands.main import app
from sartor.data import ClientData, from_clients, from_folder, from_table, relabel
from sartor.errors import DataError, SettingError
from sartor.remote.admission import Admission
from sartor.remote.join import loader
from sartor.remote.messages import Parts, decode, encode
from sartor.remote.node import Node
from sartor.remote.requests import Failed, Requests
from sartor.remote.serve import Service, serve_on
from sartor.runs.execute import execute
from sartor.runs.experiment import Experiment, from_mapping, load
from sartor.runs.inputs import Inputs
from sartor.runs.newcomers import evaluate_run
from sartor.runs.record import RunFolder
from sartor.runs.resume import resume
from sartor.studies.library import Runs

cli = CliRunner()
CLASSES = ("benign", "malignant", "unclear")
COLUMNS = ("data.client_column=site", "data.label_column=kind")
SMALL = (
    "engine.name=loop",
    "model.name=softmax",
    "local.batch=16",
    "hyper.lr=0.5",
    "data.clients=3",
    "checkpoint.every=1",
)
SITES = {"east": CLASSES, "north": CLASSES[1:], "west": CLASSES}
"""The sites with the classes of each: north has nobody of the first class."""


def rows(site: str, kinds: Sequence[str], number: int = 60, names: Sequence[str] = CLASSES) -> list[str]:
    """Rows of a table whose classes lie far apart: ``kinds`` are their labels, numbered by ``names``."""
    random = np.random.default_rng(sum(site.encode()))
    lines = []
    for place in range(number):
        kind = kinds[place % len(kinds)]
        centre = 10 * np.eye(3)[names.index(kind)]
        values = ",".join(f"{value:.4f}" for value in centre + random.normal(size=3))
        lines.append(f"{site},{values},{kind}")
    return lines


def write(path: Path, *blocks: Sequence[str]) -> Path:
    path.write_text("\n".join(["site,a,b,c,kind", *(line for block in blocks for line in block)]) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table for each of three sites, and one with all of them."""
    path = tmp_path_factory.mktemp("labels")
    for site, kinds in SITES.items():
        write(path / f"{site}.csv", rows(site, kinds))
    write(path / "all.csv", *(rows(site, kinds) for site, kinds in SITES.items()))
    return path


def simulated(table: Path, out: Path | None, *more: str, name: str = "fedavg", rounds: int = 6) -> Any:
    given = [*SMALL, *COLUMNS, f"data.path={table}", *more]
    experiment = load(None, given, algorithm=name, rounds=rounds)
    return execute(experiment, out=out, store=out is not None)


# In one process: data --------------------------------------------------------------------------------------


def named(data: ClientData) -> list[str]:
    """The label of every sample, as a text."""
    assert data.labels is not None
    parts = [part for part in (data.train, data.test, data.validation) if part is not None]
    return [data.labels[number] for part in parts for number in part.y.tolist()]


texts = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=4)


@given(
    st.lists(st.lists(texts, min_size=2, max_size=9), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=80)
def test_numbering_otherwise_changes_no_label(clients: list[list[str]], random: Any) -> None:
    held = {str(place): (np.random.rand(len(y), 2), y) for place, y in enumerate(clients)}
    data = from_clients(held, validation_fraction=0.2)
    assert data.labels == tuple(sorted({label for y in clients for label in y}))
    assert sorted(named(data)) == sorted(label for y in clients for label in y)
    law = [*(data.labels or ()), "zz zz", "00 00"]
    random.shuffle(law)
    other = from_clients(held, validation_fraction=0.2, labels=law)
    assert (other.labels, other.classes, other.hash) == (tuple(law), len(law), data.hash)
    assert named(other) == named(data)  # the same samples are in the same splits
    assert torch.equal(other.train.x, data.train.x)
    assert other.pooled_y is other.test.y
    back = relabel(other, data.labels)
    assert torch.equal(back.train.y, data.train.y)


def test_other_labels_are_other_data() -> None:
    x = np.eye(4)
    one, other = (from_clients({"a": (x, y)}) for y in (["p", "q"] * 2, ["p", "r"] * 2))
    assert torch.equal(one.train.y, other.train.y)
    assert one.hash != other.hash
    numbers = from_clients({"a": (x, [0, 1, 0, 1])})
    assert numbers.labels is None
    assert len({one.hash, other.hash, numbers.hash}) == 3


@pytest.mark.parametrize("kind", [list, np.array, lambda y: np.array(y, dtype=object), np.bytes_])
def test_texts_of_every_kind_are_labels(kind: Callable[[Any], Any]) -> None:
    y = ["é", "b", "é", "b"]
    held = np.char.encode(y, "utf-8") if kind is np.bytes_ else kind(y)
    data = from_clients({"a": (np.eye(4), held)})
    assert (data.labels, data.classes) == (("b", "é"), 2)


def test_a_folder_has_text_labels_too(tmp_path: Path) -> None:
    for name, y in (("a", ["p", "q"] * 3), ("b", ["q", "r"] * 3)):
        np.savez(tmp_path / f"{name}.npz", x=np.random.rand(6, 2), y=np.array(y))
    data = from_folder(tmp_path)
    assert data.labels == ("p", "q", "r")
    assert set(data.train.of(1)[1].tolist()) == {1, 2}
    with pytest.raises(
        DataError, match=f"^{tmp_path}: client 'b' has the label 'r', which is not among the "
    ):
        from_folder(tmp_path, labels=["p", "q"])


def test_a_label_that_looks_like_a_number_is_a_text_where_classes_are(tmp_path: Path) -> None:
    """In a CSV file, which does not say; a Parquet file does."""
    path = write(tmp_path / "t.csv", [f"a,1,2,{row},{('01', '2')[row % 2]}" for row in range(10)])
    assert from_table(path, "site", "kind").labels is None
    data = from_table(path, "site", "kind", labels=["2", "01", "x"])
    assert (data.classes, sorted(set(named(data)))) == (3, ["01", "2"])
    table = pyarrow.table({"site": ["a"] * 4, "a": range(4), "kind": [1, 2, 1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(
        DataError, match="its labels are whole numbers, but the classes are the texts '1', '2'"
    ):
        from_table(tmp_path / "t.parquet", "site", "kind", labels=["1", "2"])


def test_a_label_outside_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(DataError) as refused:
        from_table(folder / "all.csv", "site", "kind", labels=["benign", "unclear"])
    assert str(refused.value) == (
        f"{folder / 'all.csv'}: client 'east' has the label 'malignant', which is not among the classes "
        "'benign', 'unclear'; correct it, leave its samples out, or start a run with it in data.labels"
    )
    many = [f"class {number}" for number in range(30)]
    with pytest.raises(DataError, match=r"'class 7', \.\.\. \(30 in all\)"):
        from_table(folder / "all.csv", "site", "kind", labels=many)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([], "data.labels: names no class; leave it out, or name all of them"),
        (["a", "a"], "data.labels: the label 'a' is given twice"),
        (["a", ""], "data.labels: a label is empty; give every sample one"),
        (["a\n"], "data.labels: the label 'a\\n' is not printable; rename it"),
        ([1, 2], "data.labels: expected a list, got [1, 2]"),
        (["a" * 201], f"data.labels: the label 'a{'a' * 75}... has 201 characters, at most 200; rename it"),
    ],
)
def test_a_list_that_names_no_classes_is_refused(labels: list[Any], message: str) -> None:
    with pytest.raises(SettingError) as refused:
        from_mapping({"data": {"labels": labels}})
    assert str(refused.value) == message


def test_data_of_numbers_have_no_text_classes() -> None:
    with pytest.raises(DataError, match=r"digits: its labels are whole numbers, but the classes are .* 'b'"):
        execute(from_mapping({"data": {"labels": ["a", "b"]}}), store=False)


def test_a_run_in_python_has_the_classes_it_is_told_of(folder: Path) -> None:
    x, y = np.random.rand(20, 3), ["ill", "well"] * 10
    told = {"data": {"labels": ["well", "ill", "dead"]}}
    for model in (None, torch.nn.Linear(3, 3)):
        result = sartor.run("fedavg", data={"a": (x, y)}, model=model, experiment=told, rounds=1, store=False)
        assert result.task.classes == 3


# In one process: runs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    result = simulated(folder / "all.csv", folder / "run")
    assert result.summary["accuracy"]["shared_pooled"] == 1.0
    return folder / "run"


def test_a_run_stores_its_classes(run: Path) -> None:
    assert RunFolder.open(run).experiment.data.labels == CLASSES
    assert 'labels = ["benign", "malignant", "unclear"]' in (run / "config.toml").read_text()


@pytest.mark.parametrize("kind", CLASSES)
def test_newcomers_of_one_class_are_judged_by_that_class(run: Path, tmp_path: Path, kind: str) -> None:
    table = write(tmp_path / "new.csv", rows("new", [kind]))
    assert evaluate_run(run, data=table)["accuracy"]["shared_pooled"] == 1.0
    lies = [line.replace(kind, CLASSES[(CLASSES.index(kind) + 1) % 3]) for line in rows("new", [kind])]
    table = write(tmp_path / "lies.csv", lies)
    shown = cli.invoke(app, ["evaluate", str(run), "--data", str(table), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["accuracy"]["shared_pooled"] == 0.0


def test_newcomers_with_an_unknown_label_are_refused(run: Path, tmp_path: Path) -> None:
    table = write(tmp_path / "new.csv", rows("new", CLASSES), ["old,1,2,3,bening", "old,1,2,3,benign"])
    refused = cli.invoke(app, ["evaluate", str(run), "--data", str(table)])
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert refused.stderr == (
        f"sartor: {table}: client 'old' has the label 'bening', which is not among the classes 'benign', "
        "'malignant', 'unclear'; correct it, leave its samples out, or start a run with it in data.labels\n"
    )
    table = write(tmp_path / "numbers.csv", [f"new,1,2,{row},{row % 2}" for row in range(10)])
    refused = cli.invoke(app, ["evaluate", str(run), "--data", str(table)])
    assert refused.exit_code == 2
    assert "client 'new' has the label '0', which is not among the classes" in refused.stderr


def test_texts_do_not_go_with_a_run_of_numbers(folder: Path, tmp_path: Path) -> None:
    lines = [f"{site},{row % 7},{row % 5},{row},{row % 3}" for site in "abc" for row in range(20)]
    simulated(write(tmp_path / "numbers.csv", lines), tmp_path / "run", rounds=1)
    assert RunFolder.open(tmp_path / "run").experiment.data.labels is None
    refused = cli.invoke(app, ["evaluate", str(tmp_path / "run"), "--data", str(folder / "north.csv")])
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert (
        "north.csv: its labels are the texts 'malignant', 'unclear', but the classes are whole"
        in refused.stderr
    )


def test_numbers_that_are_names_are_found_again(tmp_path: Path) -> None:
    """The run's table has a text among its labels, the newcomers' has none."""
    names = ("10", "9", "other")  # in alphabetical order
    table = write(tmp_path / "t.csv", *(rows(site, names, names=names) for site in ("p", "q", "r")))
    assert simulated(table, tmp_path / "run").summary["accuracy"]["shared_pooled"] == 1.0
    new = write(tmp_path / "new.csv", rows("s", names[:2], names=names))
    assert from_table(new, "site", "kind").classes == 11
    assert evaluate_run(tmp_path / "run", data=new)["accuracy"]["shared_pooled"] == 1.0


def test_a_run_goes_on_with_its_classes(folder: Path, tmp_path: Path) -> None:
    """Also when the classes were named in another order, and more of them than occur."""
    for name, more in (("found", ()), ("named", ('data.labels=["none","unclear","malignant","benign"]',))):
        whole = simulated(folder / "all.csv", tmp_path / name, *more)
        short = tmp_path / f"{name}-short"
        simulated(folder / "all.csv", short, *more, rounds=3)
        resumed = resume(short, rounds=6)
        assert torch.equal(resumed.w, whole.w)
        assert resumed.summary["accuracy"] == whole.summary["accuracy"]
    with pytest.raises(DataError, match="client 'east' has the label 'unclear', which is not among the"):
        simulated(folder / "all.csv", None, 'data.labels=["benign","malignant"]')


def test_data_given_in_python_are_numbered_as_in_the_run(folder: Path, tmp_path: Path) -> None:
    """A run is continued with data whose classes were named in another order."""
    data = from_table(folder / "all.csv", "site", "kind")
    experiment = load(None, ["data.name=own", *SMALL], rounds=6)
    whole = execute(experiment, data=data, out=tmp_path / "whole")
    execute(replace(experiment, rounds=3), data=data, out=tmp_path / "short")
    resumed = resume(tmp_path / "short", rounds=6, data=relabel(data, CLASSES[::-1]))
    assert torch.equal(resumed.w, whole.w)
    one = from_table(write(tmp_path / "one.csv", rows("new", ["unclear"])), "site", "kind")
    assert one.classes == 1
    assert evaluate_run(tmp_path / "whole", data=one)["accuracy"]["shared_pooled"] == 1.0


def test_a_run_of_the_same_table_is_found_again(folder: Path, tmp_path: Path) -> None:
    def get(table: Path) -> bool:
        experiment = load(None, [*SMALL, *COLUMNS, f"data.path={table}"], rounds=1)
        return Runs(tmp_path / "runs").get(Inputs(experiment, None, None)).reused

    table = tmp_path / "t.csv"
    table.write_bytes((folder / "all.csv").read_bytes())
    assert [get(table), get(table)] == [False, True]
    table.write_text(table.read_text().replace("unclear", "unknown"))
    assert get(table) is False


# Nodes in one process --------------------------------------------------------------------------------------


def load_site(path: Path) -> Callable[[Experiment], ClientData]:
    return loader(path, None, "site", "kind")


def told(*more: str) -> Experiment:
    return load(None, [*SMALL, *more], algorithm="scaffold", rounds=6)


class Forgetful:
    """A node of which nothing but its folder lasts from one request to the next."""

    done, refusal = False, ""

    def __init__(self, data: Path, folder: Path) -> None:
        self.data, self.folder = data, folder

    def handle(self, parts: Parts) -> Parts:
        node = Node(load_site(self.data), self.folder)
        node.recall()
        return node.handle(parts)


@pytest.mark.parametrize(
    "labels", [(), ('data.labels=["unclear","none","malignant","benign"]',)], ids=["found", "named"]
)
@pytest.mark.parametrize("lasting", [True, False])
def test_nodes_number_classes_as_a_simulation(
    folder: Path, tmp_path: Path, labels: tuple[str, ...], lasting: bool
) -> None:
    expected = simulated(folder / "all.csv", tmp_path / "all", *labels, name="scaffold")
    nodes: dict[int, Any] = {
        number: Node(load_site(folder / f"{site}.csv"))
        if lasting
        else Forgetful(folder / f"{site}.csv", tmp_path / site)
        for number, site in enumerate(SITES, 1)
    }
    grid = HereGrid(nodes)
    found = serve_on(grid, told(*labels), Service(deadline=20), out=tmp_path / "run")
    assert torch.equal(found.w, expected.w)
    assert found.summary["accuracy"]["shared_pooled"] == expected.summary["accuracy"]["shared_pooled"] == 1.0
    stored = RunFolder.open(tmp_path / "run").experiment.data.labels
    assert stored == RunFolder.open(tmp_path / "all").experiment.data.labels
    assert stored == (("unclear", "none", "malignant", "benign") if labels else CLASSES)


def test_named_classes_stay_where_they_are(folder: Path) -> None:
    """A node that is told the classes says nothing of which of them it has."""
    law = ("unclear", "malignant", "benign")
    grid = HereGrid({1: Node(load_site(folder / "north.csv"))})
    admission = Admission(Requests(grid, 5.0), told(f"data.labels={list(law)}"))
    assert admission.greet(1).labels == law
    assert Admission(Requests(grid, 5.0), told()).greet(1).labels == CLASSES[1:]


@pytest.mark.parametrize(
    "labels",
    [
        "ab",
        ["malignant"],
        ["malignant", "malignant"],
        ["malignant", 3],
        ["malignant", ""],
        ["malignant", "\x1b[2J"],
        ["malignant", "x" * 201],
        ["malignant", ["unclear"]],
        3,
        {"malignant": 0, "unclear": 1},
    ],
)
def test_labels_that_are_none_are_malformed(folder: Path, labels: Any) -> None:
    def change(node: int, parts: Parts) -> Parts:
        header, groups = decode(parts)
        return encode({**header, "labels": labels}, groups)

    grid = HereGrid({1: Node(load_site(folder / "north.csv"))}, change)
    with pytest.raises(Failed, match="its introduction: labels: ") as refused:
        Admission(Requests(grid, 5.0), told()).greet(1)
    assert refused.value.kind == "malformed"
    assert str(refused.value).isprintable()


def test_a_server_that_names_no_classes_is_not_followed(folder: Path) -> None:
    node = Node(load_site(folder / "north.csv"))
    grid = HereGrid({1: node})
    admission = Admission(Requests(grid, 5.0), told("data.normalise=false"))
    admission.greet(1)
    opening = {"kind": "open", "run": "a", "clients": 1, "numbers": [0], "classes": 3, "buffers": "average"}
    opening |= {"at": 0, "without": [], "keep": [], "kept": [], "settled": [], "floor": 0}
    for labels, message in (
        ([1, 2, 3], "labels is "),
        ("abc", "labels is 'abc'"),
        (None, "its labels are the texts 'malignant', 'unclear', but the classes are whole numbers"),
        (["benign", "unclear"], "client 'north' has the label 'malignant', which is not among the classes"),
    ):
        with pytest.raises(Failed, match=message):
            Requests(grid, 5.0).wait(Requests(grid, 5.0).send(1, {**opening, "labels": labels}, expected={}))
    Requests(grid, 5.0).wait(Requests(grid, 5.0).send(1, {**opening, "labels": list(CLASSES)}, expected={}))


# Real processes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nursery(folder: Path) -> Iterator[Nursery]:
    pytest.importorskip("flwr")
    nursery = Nursery(folder)
    yield nursery
    nursery.close()


class Sites:
    """A server, and nodes with a table each."""

    def __init__(self, nursery: Nursery, *settings: str, options: Sequence[Any] = ()) -> None:
        self.nursery, self.port = nursery, free_port()
        self.place = nursery.folder / f"deployed-{self.port}"
        self.place.mkdir()
        self.run, self.options = self.place / "run", options
        self.server = self.serve("algorithm=scaffold", "rounds=6", *SMALL, *settings, "--out", self.run)
        self.server.wait_for("waiting for")

    def serve(self, *words: Any) -> Child:
        return self.nursery.start("serve", *words, "--listen", f"127.0.0.1:{self.port}", *self.options)

    def join(self, table: Path, state: str | None = None) -> Child:
        columns = ("--client-column", "site", "--label-column", "kind")
        where = ("--data", table, "--state", self.place / (state or table.stem))
        return self.nursery.start("join", f"127.0.0.1:{self.port}", *where, *columns)

    def refused(self, table: Path, state: str | None = None) -> str:
        """Why a node with this table cannot take part, which is all that it says."""
        node = self.join(table, state)
        assert node.wait() == 2, node.output
        said = [line for line in node.output.splitlines() if "joined" not in line]
        assert len(said) == 1, node.output
        return said[0].partition("cannot take part: ")[2]

    def done(self, nodes: Sequence[Child]) -> dict[str, Tensor]:
        assert self.server.wait() == 0, self.server.output
        for node in nodes:
            assert node.wait() == 0, node.output
        assert "Traceback" not in self.server.output
        return load_file(self.run / "models.safetensors")


def assert_as_simulated(found: dict[str, Tensor], sites: Sites, folder: Path, *more: str) -> None:
    out = sites.place / "simulated"
    summary = simulated(folder / "all.csv", out, *more, name="scaffold").summary
    expected = load_file(out / "models.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    accuracy = json.loads((sites.run / "summary.json").read_text())["accuracy"]
    assert accuracy["shared_pooled"] == summary["accuracy"]["shared_pooled"] == 1.0
    assert RunFolder.open(sites.run).experiment.data.labels == RunFolder.open(out).experiment.data.labels


@pytest.mark.slow
def test_a_site_without_the_first_class_is_no_worse(nursery: Nursery, folder: Path) -> None:
    """Labels that do not go together are refused at the door, before the run and in the middle of it, which
    goes on with what server and nodes have kept.
    """
    place = folder / "odd"
    place.mkdir()
    numbers = write(place / "numbers.csv", [f"south,1,2,{row},{row % 2}" for row in range(20)])
    twist = [line.replace("unclear", "unclaer") for line in rows("north", CLASSES[1:])]
    twisted = write(place / "twist.csv", twist)
    sites = Sites(nursery, "local.epochs=10", options=("--quorum", 3))
    nodes = {"east": sites.join(folder / "east.csv")}
    sites.server.wait_for("has joined with 'east'")
    assert sites.refused(numbers) == (
        "its labels are whole numbers, but the classes are the texts 'benign', 'malignant', 'unclear'; "
        "give all nodes labels of one kind, or name the classes in the experiment (data.labels): labels in "
        "CSV files are texts then"
    )
    nodes |= {site: sites.join(folder / f"{site}.csv") for site in ("north", "west")}
    nodes["north"].wait_for("round 2")
    nodes["north"].kill()  # all must answer, so the run waits for it
    assert "client 'north' is another node's" in sites.refused(twisted)
    reason = (
        "its label 'unclaer' is not among the classes of the run, 'benign', 'malignant', 'unclear'; "
        "correct it, leave its samples out, or start a run with it in data.labels"
    )
    assert sites.refused(twisted, "north") == reason  # the same node with other data
    assert reason in sites.server.output
    assert sites.server.wait() == 2, sites.server.output  # north will not answer
    for site in ("east", "west"):
        assert nodes[site].wait() == 2, nodes[site].output
    sites.server = sites.serve("--resume", sites.run)
    nodes = {site: sites.join(folder / f"{site}.csv") for site in SITES}
    assert_as_simulated(sites.done(list(nodes.values())), sites, folder, "local.epochs=10")


@pytest.mark.nightly
def test_classes_that_are_named_are_the_law(nursery: Nursery, folder: Path) -> None:
    place = folder / "named"
    place.mkdir()
    law = 'data.labels=["unclear","malignant","benign"]'
    other = write(place / "south.csv", rows("south", CLASSES), ["south,1,2,3,bening"])
    sites = Sites(nursery, law)
    told = (
        f"{other}: client 'south' has the label 'bening', which is not among the classes 'unclear', "
        "'malignant', 'benign'; correct it, leave its samples out, or start a run with it in data.labels"
    )
    assert sites.refused(other) == told
    assert "has joined" not in sites.server.output
    nodes = [sites.join(folder / f"{site}.csv") for site in SITES]
    assert_as_simulated(sites.done(nodes), sites, folder, law)
