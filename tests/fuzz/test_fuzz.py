"""Whatever is given or arrives is taken or refused in one line: never a traceback, never without a bound."""

from __future__ import annotations

import io
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from damage import EDITS, VALUES, edited, refused_in_one_line, toml
from hypothesis import given, settings
from hypothesis import strategies as st

import sartor
from sartor.data.clients import from_clients
from sartor.data.loaders import from_table, read_client
from sartor.data.partitions import Partition
from sartor.data.readers import read_cifar, read_idx
from sartor.remote.admission import introduction_of
from sartor.remote.audit import Audit, Entry
from sartor.remote.audit import read as read_audit
from sartor.remote.journal import Journal, rows_of
from sartor.remote.messages import decode, encode, version
from sartor.remote.node import Node
from sartor.remote.policy import Policy, policy_of, read_policy
from sartor.runs import checkpoint
from sartor.runs.experiment import collect, describe_settings, from_mapping, read_toml, to_mapping, to_toml
from sartor.runs.record import RunFolder

fuzz = settings.get_profile("fuzz")
KEYS = sorted({row.key for row in describe_settings()})
POLICY_KEYS = [
    "methods",
    "functions",
    "quantities",
    "personal_models",
    "least_batch",
    "most_exchanges",
    "require",
]
Edits = list[tuple[str, float, int, bytes]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


# -- settings and policies -----------------------------------------------------------------------------


@fuzz
@given(text=st.builds(edited, st.just(to_toml(from_mapping({})).encode()), EDITS) | st.binary(max_size=200))
def test_texts_of_experiments(place: Path, text: bytes) -> None:
    (place / "e.toml").write_bytes(text)
    with refused_in_one_line():
        from_mapping(read_toml(place / "e.toml"))


@fuzz
@given(given_=st.lists(st.tuples(st.sampled_from(KEYS) | st.text(max_size=10), VALUES), max_size=4))
def test_words_of_experiments(given_: list[tuple[str, Any]]) -> None:
    with refused_in_one_line():
        from_mapping(collect(None, [f"{key}={toml(value)}" for key, value in given_]))


@fuzz
@given(mapping=st.dictionaries(st.sampled_from(POLICY_KEYS) | st.text(max_size=8), VALUES, max_size=4))
def test_policies(place: Path, mapping: dict[str, Any]) -> None:
    with refused_in_one_line():
        assert isinstance(policy_of(mapping), Policy)
    lines = [f"{json.dumps(key)} = {toml(value)}" for key, value in mapping.items()]
    (place / "p.toml").write_text("\n".join(lines), encoding="utf-8", errors="replace")
    with refused_in_one_line():
        read_policy(place / "p.toml")


# -- data ----------------------------------------------------------------------------------------------


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


NPZ = npz(x=np.arange(24.0).reshape(6, 4), y=np.arange(6) % 3)
DTYPES = st.sampled_from(["f4", "f8", "i8", "u1", "?", "U3", "S2", "c16", "O", "M8[s]"])
SHAPES = st.lists(st.integers(0, 5), max_size=3)


@fuzz
@given(edits=EDITS)
def test_damaged_npz_files(place: Path, edits: Edits) -> None:
    (place / "c.npz").write_bytes(edited(NPZ, edits))
    with refused_in_one_line():
        from_clients({"a": read_client(place / "c.npz")})
    with refused_in_one_line():
        Partition.load(place / "c.npz")


@fuzz
@given(
    arrays=st.dictionaries(
        st.sampled_from(["x", "y", "train_x", "train_y", "test_x", "test_y", "other"]),
        st.tuples(DTYPES, SHAPES, st.integers(-3, 2**40)),
        max_size=5,
    )
)
def test_strange_npz_files(place: Path, arrays: dict[str, tuple[str, list[int], int]]) -> None:
    made = {name: np.full(shape, fill).astype(dtype) for name, (dtype, shape, fill) in arrays.items()}
    (place / "s.npz").write_bytes(npz(**made))
    with refused_in_one_line():
        from_clients({"a": read_client(place / "s.npz")})


CSV = b"client,label,a,b\nx,0,1.5,2\nx,1,0.5,1\ny,0,2,3\ny,1,1e3,4\n"


@fuzz
@given(edits=EDITS, labels=st.none() | st.just(["0", "1"]))
def test_csv_tables(place: Path, edits: Edits, labels: list[str] | None) -> None:
    (place / "t.csv").write_bytes(edited(CSV, edits))
    with refused_in_one_line():
        from_table(place / "t.csv", "client", "label", labels=labels)


@fuzz
@given(cells=st.lists(st.lists(st.text(max_size=5) | st.integers().map(str), max_size=5), max_size=6))
def test_strange_csv_tables(place: Path, cells: list[list[str]]) -> None:
    text = "client,label,a\n" + "\n".join(",".join(row) for row in cells)
    (place / "u.csv").write_bytes(text.encode(errors="surrogatepass"))
    with refused_in_one_line():
        from_table(place / "u.csv", "client", "label")


@pytest.fixture(scope="module")
def parquet(place: Path) -> bytes:
    table = pyarrow.table({"client": ["x", "x", "y"], "label": [0, 1, 0], "a": [0.5, 1.5, 2.0]})
    pyarrow.parquet.write_table(table, place / "t.parquet")
    return (place / "t.parquet").read_bytes()


@fuzz
@given(edits=EDITS)
def test_parquet_tables(place: Path, parquet: bytes, edits: Edits) -> None:
    (place / "d.parquet").write_bytes(edited(parquet, edits))
    with refused_in_one_line():
        from_table(place / "d.parquet", "client", "label")


@fuzz
@given(edits=EDITS)
def test_binary_data_sets(place: Path, edits: Edits) -> None:
    (place / "d.bin").write_bytes(edited(b"\0\0\x08\x02\0\0\0\x02\0\0\0\x03" + bytes(range(6)), edits))
    with refused_in_one_line():
        read_idx(place / "d.bin", [None, 3])
    with refused_in_one_line():
        read_cifar(place / "d.bin", 1, 10, None)


# -- messages ------------------------------------------------------------------------------------------


PARTS = encode({"round": 3, "kind": "call"}, {"shared": {"w": torch.ones(3), "c": torch.arange(2)}})


@fuzz
@given(header=EDITS, shared=EDITS, name=st.text(max_size=8))
def test_messages(header: Edits, shared: Edits, name: str) -> None:
    parts = {"header": edited(PARTS["header"], header), "shared": edited(PARTS["shared"], shared)}
    with refused_in_one_line():
        decode(parts)
    with refused_in_one_line():
        decode({**PARTS, name: b""}, {"shared": {"w": ("float32", (3,))}})


INTRODUCTION: dict[str, Any] = {
    "names": ["a", "b"],
    "counts": {"train": [3, 4], "test": [1, 1]},
    "x": {"x": ["float32", [4]]},
    "y": {"y": ["int64", []]},
    "classes": 3,
    "labels": None,
    "features": None,
    "hash": "h",
    "process": "p",
}


@fuzz
@given(changed=st.dictionaries(st.sampled_from([*INTRODUCTION, "number", "other"]), VALUES, max_size=3))
def test_introductions(changed: dict[str, Any]) -> None:
    with refused_in_one_line():
        introduction_of({**INTRODUCTION, **changed}, {}, normalised=False)
    with refused_in_one_line():
        zeros = torch.zeros(4, dtype=torch.float64)
        told = {**INTRODUCTION, "number": {"x": 7}, **changed}
        introduction_of(told, {"moments": {"mean x": zeros, "squares x": zeros + 1}}, normalised=True)


SOFTMAX = {
    "model": {"name": "softmax"},
    "engine": {"name": "loop"},
    "data": {"clients": 1, "normalise": False},
}
REQUESTS: list[dict[str, Any]] = [
    {"kind": "hello", "experiment": to_mapping(from_mapping(SOFTMAX))},
    {
        "kind": "open",
        "clients": 1,
        "numbers": [0],
        "classes": 3,
        "labels": None,
        "features": None,
        "at": 0,
        "without": [],
        "keep": [],
        "kept": [],
    },
    {
        "kind": "call",
        "exchange": 1,
        "function": "sartor.algorithms.references.fedavg:local_training",
        "algorithm": "fedavg",
        "hyper": {"lr": 0.1},
        "round": 1,
        "numbers": [0],
        "rounds": [1],
        "keeps": True,
    },
    {"kind": "fail", "reason": "why"},
]


def node() -> Node:
    """A node that has been greeted and opened."""
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    made = Node(
        lambda experiment: from_clients(
            {"a": {"train": (x, np.arange(6) % 3), "test": (x, np.arange(6) % 3)}}
        )
    )
    for request in REQUESTS[:2]:
        assert "error" not in decode(made.handle(encode(request_of(request))))[0]
    return made


def request_of(changed: dict[str, Any]) -> dict[str, Any]:
    return {"nonce": "n", "version": version(), "run": "r", "settled": [], "floor": 0, **changed}


@pytest.fixture(scope="module")
def asked() -> Node:
    return node()


@fuzz
@given(
    request_=st.sampled_from(REQUESTS[1:]),
    changed=st.dictionaries(
        st.sampled_from(["run", "settled", "floor", *REQUESTS[1], *REQUESTS[2], "transformed"]),
        VALUES,
        max_size=2,
    ),
    w=st.sampled_from([torch.zeros(15), torch.zeros(3), torch.full((15,), float("nan")), torch.zeros(15, 2)]),
)
def test_requests(asked: Node, request_: dict[str, Any], changed: dict[str, Any], w: torch.Tensor) -> None:
    header = request_of({**request_, **changed})
    parts = {**encode({}, {"shared": {"w": w}})}
    text = {**header, "tensors": json.loads(parts["header"])["tensors"]}
    parts["header"] = json.dumps(text).encode()
    with refused_in_one_line(), Watched():
        told, _ = decode(asked.handle(parts))
        assert "\n" not in str(told.get("error", ""))
    asked.done, asked.failure, asked.refusal = False, "", ""


@fuzz
@given(
    section=st.sampled_from(list(REQUESTS[0]["experiment"])),
    value=VALUES,
    code=st.just({}) | VALUES,
)
def test_greetings(asked: Node, section: str, value: Any, code: Any) -> None:
    experiment = {**REQUESTS[0]["experiment"], section: value}
    header = request_of({"kind": "hello", "experiment": experiment, "code": code})
    with refused_in_one_line(), Watched():
        asked.handle({"header": json.dumps({**header, "tensors": {}}).encode()})
    asked.refusal = ""
    for request in REQUESTS[:2]:
        asked.handle(encode(request_of(request)))


class Watched(logging.Handler):
    """Fails where a traceback is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        assert record.exc_info is None, record.exc_info

    def __enter__(self) -> Watched:
        logging.getLogger("sartor").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("sartor").removeHandler(self)

    def handleError(self, record: logging.LogRecord) -> None:
        raise


# -- records -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(place: Path) -> RunFolder:
    chosen: dict[str, Any] = {"model": "softmax", "clients": 2, "rounds": 2, "checkpoint": {"every": 1}}
    sartor.run("scaffold", data="digits", out=place / "run", engine={"name": "loop"}, **chosen)
    growing = RunFolder.create(place / "growing", from_mapping({}))
    for round in (1, 2):
        growing.add_clients({"round": round, "client": ["a", "b"], "accuracy": [0.5, None]})
        growing.add_round({"round": round, "evaluation": {}})
    return RunFolder.open(place / "run")


@fuzz
@given(
    name=st.sampled_from(["rounds.jsonl", "clients.parquet", "summary.json", "models.safetensors"]),
    edits=EDITS,
)
def test_records_of_finished_runs(run: RunFolder, name: str, edits: Edits) -> None:
    content, view = (run.path / name).read_bytes(), name.split(".")[0]
    expected = getattr(run, view)
    (run.path / name).write_bytes(edited(content, edits))
    try:
        with refused_in_one_line():
            found = getattr(run, view)
            assert found.keys() == expected.keys() if name == "models.safetensors" else found == expected
    finally:
        (run.path / name).write_bytes(content)


@fuzz
@given(name=st.sampled_from(["rounds.jsonl", "clients.arrow"]), edits=EDITS)
@pytest.mark.usefixtures("run")
def test_records_of_runs_under_way(place: Path, name: str, edits: Edits) -> None:
    growing = RunFolder.open(place / "growing")
    content, view = (growing.path / name).read_bytes(), name.split(".")[0]
    expected = getattr(growing, view)
    (growing.path / name).write_bytes(edited(content, edits))
    try:
        with refused_in_one_line():
            found = getattr(growing, view)
            if view == "rounds":  # lines at the end may have been cut off, which a kill does too
                assert found == expected[: len(found)]
            else:
                assert found == expected
    finally:
        (growing.path / name).write_bytes(content)


@fuzz
@given(edits=EDITS, both=st.booleans())
def test_checkpoints(run: RunFolder, edits: Edits, both: bool) -> None:
    found = checkpoint.paths(run)
    kept = {path: path.read_bytes() for path in found}
    last = checkpoint.latest(run)
    assert last is not None
    for path in found if both else found[:1]:
        path.write_bytes(edited(kept[path], edits))
    try:
        with refused_in_one_line():
            again = checkpoint.latest(run)
            assert again is not None
            assert again.round in (1, 2)
            if again.round == last.round:
                assert all(torch.equal(again.tensors[name], value) for name, value in last.tensors.items())
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


@fuzz
@given(name=st.sampled_from(["config.toml", "environment.json"]), edits=EDITS)
def test_what_a_run_begins_with(run: RunFolder, name: str, edits: Edits) -> None:
    content, expected = (run.path / name).read_bytes(), run.experiment
    (run.path / name).write_bytes(edited(content, edits))
    try:
        with refused_in_one_line():
            found = RunFolder.open(run.path).experiment
            lasting = ("rounds", "checkpoint", "tracking")
            ours, theirs = to_mapping(found), to_mapping(expected)
            assert all(ours[key] == theirs[key] for key in ours if key not in lasting)
    finally:
        (run.path / name).write_bytes(content)


@fuzz
@given(edits=EDITS)
def test_states_of_nodes(place: Path, edits: Edits) -> None:
    folder = place / "journal"
    shutil.rmtree(folder, ignore_errors=True)
    rows = rows_of(torch.tensor([3, 5]), {"c": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    Journal(folder).stage(1, rows)
    (path,) = folder.iterdir()
    path.write_bytes(edited(path.read_bytes(), edits))
    with refused_in_one_line():
        settled = Journal(folder).settle(1, [3])
        assert settled["c"][1].tolist() == [[1.0, 2.0]]


@fuzz
@given(edits=EDITS, head=st.booleans())
def test_audit_logs(place: Path, edits: Edits, head: bool) -> None:
    folder = place / "audit"
    if not folder.exists():
        for number in range(3):
            Audit(folder).add("answered", f"Sent {number}.")
        shutil.copytree(folder, place / "audit whole")
    expected = list(read_audit(place / "audit whole"))
    name = "audit.head" if head else "audit.jsonl"
    content = (place / "audit whole" / name).read_bytes()
    (folder / name).write_bytes(edited(content, edits))
    try:
        with refused_in_one_line():
            found = [entry for entry in read_audit(folder) if isinstance(entry, Entry)]
            assert found == expected
    finally:
        (folder / name).write_bytes(content)
