"""Tables by a schema: what clients tell adds up exactly, and all prepare their rows alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from flower_grid import HereGrid
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import OneHotEncoder, QuantileTransformer, StandardScaler

import sartor
from sartor.data.clients import from_clients
from sartor.data.loaders import from_table
from sartor.data.readers import read_table
from sartor.data.schema import columns_mapping, feature_names, read_columns, settles
from sartor.data.statistics import (
    CELLS,
    UNIT,
    agreed,
    exact_sum,
    fault,
    merged,
    statistics_of,
)
from sartor.data.tables import (
    SchemaColumns,
    blank,
    encode,
    from_schema,
    prepared,
)
from sartor.errors import DataError, SettingError
from sartor.remote.admission import Admission
from sartor.remote.audit import Audit
from sartor.remote.join import loader
from sartor.remote.keeping import read_kept
from sartor.remote.messages import Parts, decode
from sartor.remote.messages import encode as message
from sartor.remote.node import Node
from sartor.remote.policy import Policy
from sartor.remote.requests import Failed, Requests
from sartor.remote.serve import Service, serve_on
from sartor.runs.execute import execute
from sartor.runs.experiment import Experiment, from_mapping, load, to_mapping, to_toml
from sartor.runs.newcomers import evaluate_run
from sartor.runs.record import RunFolder

SCHEMA: dict[str, Any] = {
    "patient": "out",
    "sex": {"kind": "category", "codes": {"female": "f", "male": "m"}, "missing": "place"},
    "age": {"missing": "median", "indicator": True, "scale": "robust", "low": 0.0, "high": 120.0},
    "dose": {"missing": "mean"},
    "grade": {"kind": "ordinal", "values": ["low", "mid", "high"], "missing": "most frequent"},
    "seen": {"kind": "date", "since": "born", "parts": ["month"]},
    "born": {"kind": "date"},
    "note": {"kind": "text", "size": 4},
    "ill": "label",
}
SITES = {"bergen": (30, ("female", "male")), "oslo": (40, ("f", "m")), "tromso": (3, ("f", "x"))}


def rows_of(site: str, number: int, codes: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of a hospital with gaps and codes of its own; whoever is old is ill."""
    random = np.random.default_rng(sum(site.encode()))
    rows = []
    for place in range(number):
        age = random.uniform(20, 100)
        row = {
            "patient": f"{site}-{place}",
            "sex": codes[place % 2],
            "age": f"{age:.1f}",
            "dose": f"{random.normal(5, 2):.3f}",
            "grade": ("low", "mid", "high")[int(age // 34)],
            "seen": f"2024-0{place % 9 + 1}-05",
            "born": f"{2024 - int(age)}-01-01",
            "note": "cough and fever" if age > 60 else "cough",
            "ill": int(age > 60),
        }
        gap = random.choice(["age", "dose", "grade", "sex", "", "", "", ""])
        rows.append({**row, gap: ""} if gap else row)
    return rows


def write(path: Path, rows: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> Path:
    names = list(rows[0]) if columns is None else list(columns)
    lines = [",".join(names), *(",".join(str(row[name]) for name in names) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("schema")
    for site, (number, codes) in SITES.items():
        write(path / f"{site}.csv", rows_of(site, number, codes))
    return path


def told(*more: str, **tables: Any) -> Experiment:
    words = ["engine.name=loop", "model.name=softmax", "local.batch=8", "checkpoint.every=1"]
    mapping = {"columns": SCHEMA, "data": {"clients": 3}, **tables}
    return load(None, [*words, *more], algorithm="scaffold", rounds=3, **_flat(mapping))


def _flat(mapping: dict[str, Any]) -> dict[str, Any]:
    """Tables as dotted keys, as the command line gives them."""
    return {f"{table}.{key}": value for table, values in mapping.items() for key, value in values.items()}


# What is told ---------------------------------------------------------------------------------------------

numbers = st.lists(st.floats(-1e18, 1e18, allow_subnormal=False).map(lambda v: 0.0 if abs(v) < 1e-30 else v))


@given(numbers)
@settings(max_examples=50, deadline=None)
def test_sums_are_exact(values: list[float]) -> None:
    exact = sum(map(Fraction, values), Fraction(0))
    assert Fraction(exact_sum(np.array(values, np.float64)), 1 << UNIT) == exact


def test_numbers_whose_squares_are_too_small_to_count_can_be_told() -> None:
    columns = read_columns({"a": {"missing": "mean"}})
    for values in ([4e-26], [3e-26, 3e-26], [1e-30] * 5, [1.0, 4e-26]):
        told = statistics_of(columns, {"a": np.array(values)})
        assert fault(columns, told, len(values)) is None
        more = {"a": {**told["a"], "sum": told["a"]["sum"] + (1 << 200)}}  # by 1
        assert fault(columns, more, len(values)) is not None


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6) | st.just(np.nan), max_size=6), min_size=1, max_size=4), st.data()
)
@settings(max_examples=40, deadline=None)
def test_it_does_not_matter_who_adds_up_and_when(parts: list[list[float]], data: st.DataObject) -> None:
    columns = read_columns({"a": {"missing": "mean"}, "b": {"scale": "quantile", "low": -10, "high": 10}})
    raw = [np.array(part, np.float64) for part in parts]
    told = [statistics_of(columns, {"a": each, "b": each}) for each in raw]
    whole = np.concatenate(raw)
    expected = statistics_of(columns, {"a": whole, "b": whole})
    shuffled = data.draw(st.permutations(told))
    assert merged(columns, [merged(columns, shuffled[:1]), *shuffled[1:]]) == expected
    assert fault(columns, expected, len(whole)) is None
    if np.isfinite(whole).any():
        assert settles(columns, agreed(columns, expected))


def test_what_is_learned_is_what_the_whole_table_has() -> None:
    random = np.random.default_rng(0)
    values = random.normal(50, 12, 5000)
    columns = read_columns(
        {
            "plain": {"missing": "mean"},
            "robust": {"missing": "median", "scale": "robust", "low": 0, "high": 100},
            "kind": {"kind": "category", "missing": "most frequent"},
        }
    )
    kinds = np.array(["b", "a", "b", None, "a", "c"], dtype=object)
    raw = {"plain": values, "robust": values, "kind": kinds}
    plain, robust, kind = agreed(columns, statistics_of(columns, raw))
    assert plain.fill == plain.centre == pytest.approx(values.mean(), rel=1e-14)
    assert plain.spread == pytest.approx(values.std(), rel=1e-12)
    cell = 100 / CELLS
    assert robust.centre == pytest.approx(np.median(values), abs=cell)
    assert robust.spread == pytest.approx(np.subtract(*np.percentile(values, [75, 25])), abs=2 * cell)
    assert (kind.fill, kind.values) == ("a", ("a", "b", "c"))  # of equally frequent ones the first


def test_a_column_far_from_zero_and_one_of_a_single_value_are_scaled() -> None:
    columns = read_columns({"year": {}, "same": {}})
    raw = {"year": np.array([2000.0, 2001, 2002]), "same": np.array([0.1, 0.1, 0.1])}
    year, same = agreed(columns, statistics_of(columns, raw))
    assert year.spread == pytest.approx(np.sqrt(2 / 3), rel=1e-9)
    assert (same.centre, same.spread) == (pytest.approx(0.1), 1.0)


def test_rare_categories_are_not_told_of() -> None:
    columns = read_columns({"kind": {"kind": "category", "least": 2}})
    told = statistics_of(columns, {"kind": np.array(["a", "a", "b", None], dtype=object)})
    assert told == {"kind": {"values": {"a": 2}}}


def test_nothing_is_told_of_what_is_declared() -> None:
    declared = {"age": {"centre": 50, "spread": 10}, "sex": {"kind": "category", "values": ["f", "m"]}}
    assert statistics_of(read_columns(declared), {}) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 5},
        {"rows": 3, "sum": 1.5},
        {"sum": 1 << 900},
        {"squares": -1},
        {"sum": 10**6 << UNIT},  # more than squares allow
        {"grid": [0] * CELLS},
        {"grid": [3] + [0] * (CELLS - 2)},
        {"grid": [4, -1] + [0] * (CELLS - 2)},
        {"values": {}},
    ],
)
def test_what_cannot_be_true_is_refused(wrong: dict[str, Any]) -> None:
    columns = read_columns({"a": {"missing": "median", "low": 0, "high": 4}})
    told = statistics_of(columns, {"a": np.array([1.0, 2.0, 3.0])})
    assert fault(columns, told, 4) is None
    assert fault(columns, {"a": {**told["a"], **wrong}}, 4) is not None
    assert fault(columns, {}, 4) is not None


def test_a_mean_outside_the_declared_range_is_refused() -> None:
    columns = read_columns({"a": {"low": 0, "high": 4}})
    told = {"a": {"rows": 1, "sum": 9 << UNIT, "squares": 81 << UNIT}}
    assert fault(columns, told, 1) is not None
    assert fault(columns, statistics_of(columns, {"a": np.array([9.0])}), 1) is None  # counts as 4


# What rows become -----------------------------------------------------------------------------------------


def test_transforms_are_those_of_scikit_learn() -> None:
    random = np.random.default_rng(1)
    values = random.normal(3, 2, 400)
    kinds = np.array(["a", "b", "c", "d"], dtype=object)[random.integers(0, 4, 400)]
    ranks = np.linspace(values.min(), values.max(), 9)
    columns = read_columns(
        {
            "a": {},
            "b": {"scale": "quantile", "quantiles": ranks.tolist()},
            "c": {"kind": "category", "values": ["a", "b", "c"]},
        }
    )
    raw = {"a": values, "b": values, "c": kinds}
    x = encode(agreed(columns, statistics_of(columns, raw)), raw).numpy()
    assert np.allclose(x[:, 0], StandardScaler().fit_transform(values[:, None])[:, 0], atol=1e-6)
    coder = QuantileTransformer(n_quantiles=9, subsample=None).fit(ranks[:, None])
    assert np.allclose(x[:, 1], coder.transform(values[:, None])[:, 0], atol=1e-6)
    expected = OneHotEncoder(categories=[["a", "b", "c"]], handle_unknown="ignore").fit(kinds[:1, None])
    assert np.array_equal(x[:, 2:5], expected.transform(kinds[:, None]).toarray())
    assert np.array_equal(x[:, 5], kinds == "d")  # unknown ones have a place


def test_gaps_are_filled_and_told(tmp_path: Path) -> None:
    rows = [
        {"sex": "f", "age": 40, "grade": "mid", "ill": 0},
        {"sex": "", "age": "", "grade": "", "ill": 1},
    ] * 3
    schema = {
        "sex": {"kind": "category", "missing": "place", "indicator": True, "values": ["f", "m"]},
        "age": {"missing": "mean", "indicator": True, "scale": "none", "fill": 33},
        "grade": {"kind": "ordinal", "values": ["low", "mid", "high"], "missing": "most frequent"},
        "ill": "label",
    }
    data = prepared(from_schema(write(tmp_path / "t.csv", rows), schema))
    assert data.columns is not None
    names = ["age", "age missing", "grade", "sex = f", "sex = m", "sex unknown", "sex missing"]
    assert feature_names(data.columns) == names
    samples = sorted(zip(data.train.y.tolist(), data.train.x.tolist(), strict=True))
    assert samples[0][1] == [40, 0, 0.5, 1, 0, 0, 0]
    assert samples[-1][1] == [33, 1, 0.5, 0, 0, 1, 1]


def test_dates_are_days_and_points_of_circles(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv", [{"seen": "02.01.1970", "born": "1969-12-31", "h": "1970-01-01 06:00:00"}]
    )
    columns = read_columns(
        {
            "seen": {"kind": "date", "format": "%d.%m.%Y", "since": "born", "scale": "none"},
            "born": {"kind": "date", "scale": "none", "parts": ["month", "weekday"]},
            "h": {"kind": "date", "scale": "none", "parts": ["hour"]},
        }
    )
    x = SchemaColumns(columns).samples(read_table(path, None), "t")[0].numpy()
    december, wednesday = 2 * np.pi * 11 / 12, 2 * np.pi * 2 / 7
    born = [-1, np.sin(december), np.cos(december), np.sin(wednesday), np.cos(wednesday)]
    expected = [*born, 0.25, 1, 0, 2]
    assert np.allclose(x, expected, atol=1e-6)


def test_categories_for_an_embedding_are_numbers() -> None:
    columns = read_columns(
        {"kind": {"kind": "category", "code": "index", "values": ["a", "b"]}, "age": "number"}
    )
    raw = {"kind": np.array(["b", "a", "z", None], dtype=object), "age": np.zeros(4)}
    columns = agreed(columns, statistics_of(columns, raw))
    x = encode(columns, raw)
    assert x["categories"].tolist() == [[2], [1], [0], [0]]
    assert x["numbers"].shape == (4, 1)
    assert blank(columns)["categories"].tolist() == [[2]]


def test_the_words_of_a_column_are_found_again_in_samples() -> None:
    columns = read_columns(
        {
            "age": "number",
            "ward": {"kind": "category", "code": "index", "values": ["a", "b"]},
            "sex": {"kind": "category", "values": ["f", "m"], "missing": "place", "indicator": True},
            "stage": {"kind": "ordinal", "values": ["I", "II", "III"]},
        }
    )
    words = {"ward": ["b", "a", "z"], "sex": ["m", None, "f"], "stage": ["III", "I", "II"]}
    raw = {name: np.array(values, dtype=object) for name, values in words.items()} | {"age": np.arange(3.0)}
    columns = agreed(columns, statistics_of(columns, raw))
    x, reader = encode(columns, raw), SchemaColumns(columns)
    assert reader.values(x, "ward") == ["b", "a", "unknown"]
    assert reader.values(x, "sex") == ["m", "unknown", "f"]
    assert reader.values(x, "stage") == words["stage"]
    assert reader.values(x, "age") is None


def test_words_are_hashed_alike_and_case_does_not_matter() -> None:
    columns = read_columns({"note": {"kind": "text", "size": 16, "missing": "place"}})
    x = encode(columns, {"note": np.array(["Fever, cough", "cough fever", None], dtype=object)})
    assert torch.equal(x[0], x[1])
    assert not x[2].any()


def test_a_parquet_file_is_read_like_a_csv_file(tmp_path: Path, folder: Path) -> None:
    table = pyarrow.csv.read_csv(folder / "oslo.csv")
    pyarrow.parquet.write_table(table, tmp_path / "oslo.parquet")
    ways = [prepared(from_schema(path, SCHEMA)) for path in (folder / "oslo.csv", tmp_path / "oslo.parquet")]
    assert torch.equal(ways[0].train.x, ways[1].train.x)
    assert ways[0].hash == ways[1].hash


def test_words_are_found_as_another_kind_of_file_writes_them() -> None:
    reader = SchemaColumns(
        read_columns(
            {
                "smokes": {"kind": "category", "values": ["False", "True"]},
                "stage": {"kind": "category", "codes": {"1": "early"}, "values": ["2.0", "early"]},
                "ward": {"kind": "category", "values": ["01", "1.0"]},
            }
        )
    )
    csv_file = {"smokes": ["True", "False"], "stage": ["1.0", "2"], "ward": ["01", "1.0"]}
    wanted = reader.samples({name: pyarrow.array(values) for name, values in csv_file.items()}, "t")
    other = {"smokes": [True, False], "stage": [1, 2], "ward": ["01", "1.0"]}
    found = reader.samples({name: pyarrow.array(values) for name, values in other.items()}, "t")
    assert reader.values(wanted, "smokes") == ["True", "False"]
    assert reader.values(wanted, "stage") == ["early", "2.0"]
    assert torch.equal(found, wanted)
    # Nobody can say which of two like ones is meant.
    unclear = reader.samples({name: pyarrow.array(v) for name, v in (other | {"ward": [1, 1]}).items()}, "t")
    assert reader.values(unclear, "ward") == ["unknown", "unknown"]


def test_numbers_and_dates_that_are_written_as_texts_are_read() -> None:
    schema = {
        "age": {"missing": "mean", "fill": 5.0, "scale": "none"},
        "seen": {"kind": "date", "scale": "none"},
    }
    held = {
        "age": [" 61", "47 ", "", "NA"],
        "seen": ["1970-01-02", " 1970-01-03", "1970-01-04 ", "1970-01-05"],
    }
    found = SchemaColumns(read_columns(schema)).samples({k: pyarrow.array(v) for k, v in held.items()}, "t")
    assert found.tolist() == [[61, 1], [47, 2], [5, 3], [5, 4]]


def test_two_tables_of_one_client_are_refused(tmp_path: Path, folder: Path) -> None:
    table = pyarrow.csv.read_csv(folder / "oslo.csv")
    pyarrow.parquet.write_table(table, tmp_path / "oslo.parquet")
    for name in ("oslo.csv", "oslo.b.csv"):
        (tmp_path / name).write_bytes((folder / "oslo.csv").read_bytes())
    with pytest.raises(DataError, match=r"oslo\.csv and oslo\.parquet are both the table of client oslo"):
        from_schema(tmp_path, SCHEMA)
    (tmp_path / "oslo.parquet").unlink()
    assert from_schema(tmp_path, SCHEMA).names == ("oslo", "oslo.b")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"a": {"kind": "nmber"}}, "columns.a.kind: must be one of number, date"),
        ({"a": {"values": ["x"]}}, "columns.a.values: not for a column of kind number"),
        ({"a": {"missing": "place"}}, "columns.a.missing: must be one of refuse, mean, median"),
        ({"a": {"missing": "median"}}, "columns.a: quantiles are counted on a grid, which low and high"),
        ({"a": {"low": 1}}, "columns.a: give low and high"),
        ({"a": {"kind": "ordinal"}}, "columns.a.values: missing"),
        ({"a": "label", "b": "label", "c": "number"}, "columns: two are of kind label, a and b"),
        ({"a": "label"}, "columns: none is a feature"),
        ({"a": {"kind": "date", "since": "b"}}, "columns.a.since: 'b' is no other column of kind date"),
        ({"a": {"fill": "x", "missing": "mean"}}, "columns.a.fill: expected a number"),
        ({"a": {"name": "b"}}, "columns.a.name: the name is the key"),
        ({"a": 3}, "columns.a: expected a table, got 3"),
        ([{"name": "a"}], "columns: expected a table"),
        ({"a": {"scale": "quantile", "quantiles": [2, 1]}}, "columns.a.quantiles: expected two or more"),
    ],
)
def test_a_wrong_schema_is_one_message(schema: Any, message: str) -> None:
    with pytest.raises(SettingError) as refused:
        from_mapping({"columns": schema})
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"age": "old"}, "column age holds 'old' in row 1 (first row is 0), which is no number"),
        ({"age": "1e300"}, "column age holds 1e+300 in row 1, which is too large"),
        ({"born": "yesterday"}, "column born holds 'yesterday' in row 1"),
        ({"sex": "f\xa0x"}, "which names no category; say which one it is (columns.sex.codes)"),
        ({"grade": "huge"}, "column grade holds 'huge', which is not among its values 'low', 'mid', 'high'"),
        ({"note": ""}, "column note has no value in row 1 (first row is 0); say what fills gaps"),
        ({"ill": ""}, "column ill has no value in row 1 (first row is 0); every row needs one"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rows = rows_of("oslo", 6, ("f", "m"))
    rows[1] |= change
    with pytest.raises(DataError) as refused:
        from_schema(write(tmp_path / "t.csv", rows), SCHEMA)
    assert message in str(refused.value)


def test_a_column_that_is_not_there_is_named_and_one_too_many_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{**row, "weight": 70} for row in rows_of("oslo", 6, ("f", "m"))]
    names = [name for name in rows[0] if name != "patient"]  # one that is left out anyway
    with caplog.at_level(logging.WARNING):
        from_schema(write(tmp_path / "t.csv", rows, names), SCHEMA)
    assert "does not have the columns weight; they are left out" in caplog.text
    with caplog.at_level(logging.WARNING):
        from_schema(write(tmp_path / "t.csv", [{"": 1, **row} for row in rows_of("oslo", 6, "fm")]), SCHEMA)
    assert "does not have the columns without a name; they are left out" in caplog.text
    with pytest.raises(DataError, match=r"no column dose, which the schema has .* did you mean"):
        from_schema(write(tmp_path / "t.csv", rows, [name for name in rows[0] if name != "dose"]), SCHEMA)


def test_splits_and_clients_are_columns_too(tmp_path: Path) -> None:
    rows = [{"site": site, "part": part, "a": place, "y": place % 2} for place, (site, part) in enumerate(
        [("n", "train"), ("n", "test"), ("s", "train"), ("s", "test"), ("n", "train")]
    )]  # fmt: skip
    schema = {"site": "client", "part": "split", "a": {"scale": "none"}, "y": "label"}
    data = prepared(from_schema(write(tmp_path / "t.csv", rows), schema))
    assert (data.names, data.train.x.flatten().tolist()) == (("n", "s"), [0, 4, 2])
    assert data.test.x.flatten().tolist() == [1, 3]
    rows[0]["part"] = "trian"
    with pytest.raises(DataError, match="column part says 'trian'; expected train, test or validation"):
        from_schema(write(tmp_path / "t.csv", rows), schema)


def test_numbers_are_targets_of_a_regression(tmp_path: Path) -> None:
    rows = [{"a": place, "y": place / 2} for place in range(6)]
    schema = {"a": "number", "y": "label"}
    data = from_schema(write(tmp_path / "t.csv", rows), schema, targets="number")
    assert data.classes is None
    with pytest.raises(DataError, match="column y holds no numbers"):
        from_schema(write(tmp_path / "u.csv", [{"a": 1, "y": "x"}]), schema, targets="number")


# Runs -----------------------------------------------------------------------------------------------------


def simulated(folder: Path, out: Path, *more: str) -> Any:
    return execute(told(f"data.path={folder}", *more), out=out)


def test_a_run_stores_what_was_learned_and_newcomers_are_prepared_by_it(folder: Path, tmp_path: Path) -> None:
    result = simulated(folder, tmp_path / "run")
    stored = RunFolder.open(tmp_path / "run").experiment
    assert settles(told().columns, stored.columns)
    assert from_mapping(RunFolder.open(tmp_path / "run").config) == stored
    sex = stored.columns[1]
    assert sex.values == ("f", "m", "x")
    rows = rows_of("oslo", *SITES["oslo"])
    (tmp_path / "new").mkdir()
    swapped = write(tmp_path / "new" / "oslo.csv", rows, list(reversed(rows[0])))
    found = evaluate_run(tmp_path / "run", data=swapped)
    same = evaluate_run(tmp_path / "run", data=folder / "oslo.csv")
    assert found["last"]["shared_local"]["loss"] == same["last"]["shared_local"]["loss"]
    assert found["accuracy"] == same["accuracy"]
    lacking = write(tmp_path / "lacking.csv", rows, [name for name in rows[0] if name != "age"])
    with pytest.raises(DataError, match=r"lacking\.csv: no column age"):
        evaluate_run(tmp_path / "run", data=lacking)
    again = execute(replace(stored, rounds=3), store=False)
    assert torch.equal(again.w, result.w)


def test_a_label_outside_the_run_s_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    names = {0: "well", 1: "ill"}
    for site, (number, codes) in SITES.items():
        rows = [{**row, "ill": names[row["ill"]]} for row in rows_of(site, number, codes)]
        write(tables / f"{site}.csv", rows)
    simulated(tables, tmp_path / "run")
    rows[0]["ill"] = "unclear"
    with pytest.raises(
        DataError, match="has the label 'unclear', which is not among the classes 'ill', 'well'"
    ):
        evaluate_run(tmp_path / "run", data=write(tmp_path / "new.csv", rows))


def test_python_and_the_command_line_prepare_alike(folder: Path, tmp_path: Path) -> None:
    words = simulated(folder, tmp_path / "run")
    given = {"local": {"batch": 8}, "engine": "loop", "model": "softmax", "rounds": 3}
    python = sartor.run("scaffold", data=str(folder), columns=SCHEMA, store=False, **given)
    assert torch.equal(words.w, python.w)
    (tmp_path / "e.toml").write_text(to_toml(told(f"data.path={folder}")))
    assert load(tmp_path / "e.toml") == told(f"data.path={folder}")


def test_one_column_is_changed_by_a_word(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(to_toml(told()))
    column = load(tmp_path / "e.toml", ["columns.dose.scale=none", "columns.age.indicator=false"]).columns
    assert (column[3].scale, column[2].indicator) == ("none", False)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"data": {"normalise": True}}, "data.normalise: [columns] says how each is scaled"),
        (
            {"data": {"path": "x", "label_column": "y"}},
            "data.label_column: [columns] says what the columns are",
        ),
        ({"features": {"name": "hog"}}, "features.name: [columns] says what features are"),
        ({"expect": {"low": 0}}, "expect.low: [columns] has low for each"),
    ],
)
def test_what_a_schema_says_is_said_once(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as refused:
        from_mapping({"columns": {"a": {}}, **mapping})
    assert str(refused.value).startswith(message)


def test_a_schema_of_no_table_is_refused() -> None:
    with pytest.raises(SettingError, match="columns: only for an own table"):
        execute(told(), store=False)


# Nodes ----------------------------------------------------------------------------------------------------


class Forgetful:
    """A node of which nothing but its folder lasts from one request to the next."""

    done, refusal = False, ""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder = path, folder

    def handle(self, parts: Parts) -> Parts:
        node = Node(loader(self.path, None, None, None), self.folder)
        node.recall()
        return node.handle(parts)


def nodes_of(folder: Path, make: Callable[[Path], Any]) -> dict[int, Any]:
    return {number: make(folder / f"{site}.csv") for number, site in enumerate(SITES, 1)}


@pytest.mark.parametrize("lasting", [True, False])
def test_nodes_prepare_their_tables_as_a_simulation_does(folder: Path, tmp_path: Path, lasting: bool) -> None:
    expected = simulated(folder, tmp_path / "here")
    grid = HereGrid(
        nodes_of(folder, lambda path: Node(loader(path, None, None, None)))
        if lasting
        else nodes_of(folder, lambda path: Forgetful(path, tmp_path / path.stem))
    )
    found = serve_on(grid, told(), Service(deadline=20), out=tmp_path / "there")
    assert torch.equal(found.w, expected.w)
    stored = [RunFolder.open(tmp_path / place).experiment.columns for place in ("here", "there")]
    assert stored[0] == stored[1]
    assert found.summary["accuracy"]["shared_pooled"] == expected.summary["accuracy"]["shared_pooled"]


def test_categories_for_an_embedding_are_agreed_on_at_nodes_too(folder: Path, tmp_path: Path) -> None:
    """Tromsø alone has the sex x; the embeddings of all have a place for it."""
    mapping = to_mapping(told())
    mapping["model"], mapping["columns"]["sex"]["code"] = {"name": "table", "hidden": [4]}, "index"
    experiment = from_mapping(mapping)
    data = replace(experiment.data, path=str(folder))
    expected = execute(replace(experiment, data=data), store=False)
    grid = HereGrid(nodes_of(folder, lambda path: Node(loader(path, None, None, None), tmp_path / path.stem)))
    found = serve_on(grid, experiment, Service(deadline=20), out=tmp_path / "there")
    assert torch.equal(found.w, expected.w)
    assert RunFolder.open(tmp_path / "there").experiment.model.settings.categories == (4,)
    kept = read_kept(tmp_path / "oslo")  # which knows of the place, too, without a server
    assert torch.equal(kept.w, expected.w)
    assert kept.task.size == len(expected.w)


def greet(node: Node, experiment: Experiment, change: Any = None) -> Any:
    return Admission(Requests(HereGrid({1: node}, change), 5.0), experiment).greet(1)


def test_a_node_tells_what_the_columns_need_and_its_log_says_so(folder: Path, tmp_path: Path) -> None:
    audit = Audit(None)
    met = greet(Node(loader(folder / "oslo.csv", "Oslo", None, None), audit=audit), told())
    assert met.names == ("Oslo",)
    assert {name: set(held) for name, held in met.table.items()} == {
        "sex": {"values"},
        "age": {"rows", "grid"},
        "dose": {"rows", "sum", "squares"},
        "grade": {"values"},
        "seen": {"rows", "sum", "squares"},
        "born": {"rows", "sum", "squares"},
    }
    assert audit.last is not None
    assert "age (how many values, how many lie in each cell of a grid)" in audit.last.words
    learned = agreed(told().columns, met.table)
    node = Node(loader(folder / "oslo.csv", None, None, None), policy=Policy(moments=False, counts=False))
    assert greet(node, replace(told(), columns=learned)).table == {}


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy(counts=False), "of the column sex it is asked which categories it has and how often"),
        (Policy(moments=False), "of the column dose it is asked the sum and the squares"),
    ],
)
def test_a_node_that_keeps_its_counts_refuses(folder: Path, policy: Policy, message: str) -> None:
    with pytest.raises(Failed, match=message):
        greet(Node(loader(folder / "oslo.csv", None, None, None), policy=policy), told())


def test_a_node_that_tells_what_cannot_be_is_refused(folder: Path) -> None:
    def change(node: int, parts: Parts) -> Parts:
        header, groups = decode(parts)
        header["table"]["dose"]["sum"] = 1 << 900
        return message(header, groups)

    with pytest.raises(Failed, match="its introduction: table: 'dose': not what can be told of 32 rows"):
        greet(Node(loader(folder / "oslo.csv", None, None, None)), told(), change)


@pytest.mark.parametrize("other", [{"patient": {"kind": "number"}}, {"age": {"missing": "mean", "fill": 1}}])
def test_a_server_cannot_change_the_columns_that_a_node_agreed_to(
    folder: Path, other: dict[str, Any]
) -> None:
    node = Node(loader(folder / "oslo.csv", None, None, None))
    met = greet(node, told())
    columns = {**columns_mapping(agreed(told().columns, met.table)), **other}
    opening = {"kind": "open", "run": "a", "clients": 1, "numbers": [0], "classes": 2, "labels": None}
    opening |= {"at": 0, "without": [], "keep": [], "kept": [], "settled": [], "floor": 0, "columns": columns}
    requests = Requests(HereGrid({1: node}), 5.0)
    with pytest.raises(Failed, match="its columns are not those of the experiment"):
        requests.wait(requests.send(1, opening, expected={}))


def test_data_without_columns_do_not_take_part_by_a_schema(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "north.npz", x=np.eye(4), y=[0, 1, 0, 1])
    with pytest.raises(Failed, match="the experiment describes the columns of a table; give one"):
        greet(Node(loader(tmp_path / "north.npz", None, None, None)), told())
    with pytest.raises(Failed, match="--client-column, --label-column: the experiment says what columns are"):
        greet(Node(loader(folder / "oslo.csv", None, "site", None)), told())


def test_plain_tables_with_other_columns_are_found(tmp_path: Path) -> None:
    rows = [{"site": site, "a": 1, "b": 2, "y": place % 2} for place, site in enumerate("nnnnss")]
    orders = {"n": ["site", "a", "b", "y"], "s": ["site", "b", "a", "y"]}
    nodes = {}
    for number, (site, order) in enumerate(orders.items(), 1):
        path = write(tmp_path / f"{site}.csv", [row for row in rows if row["site"] == site], order)
        nodes[number] = Node(loader(path, None, "site", "y"))
    experiment = load(None, ["model.name=softmax", "data.clients=2"], rounds=1)
    admission = Admission(Requests(HereGrid(nodes), 5.0), experiment)
    from sartor.remote.admission import misfit

    reason = misfit(admission.greet(2), [admission.greet(1)])
    assert reason is not None
    assert reason.startswith("the columns of its table are 'b', 'a', those of the others 'a', 'b'")


# Plain tables, and data given in Python ---------------------------------------------------------------------


def test_columns_of_a_plain_table_are_settings_and_found_by_name(tmp_path: Path) -> None:
    rows = [
        {"s": "ab"[place % 2], "u": place, "v": -place, "w": 0, "p": "train", "y": place % 2}
        for place in range(12)
    ]
    for place in (1, 2, 3, 4):
        rows[place]["p"] = "test"
    path = write(tmp_path / "t.csv", rows)
    words = [
        "data.client_column=s",
        "data.label_column=y",
        'data.feature_columns=["v","u"]',
        "data.split_column=p",
    ]
    experiment = load(None, [*words, f"data.path={path}", "model.name=softmax"], rounds=1)
    execute(experiment, out=tmp_path / "run")
    found = evaluate_run(tmp_path / "run")
    swapped = write(tmp_path / "new.csv", rows, ["y", "v", "w", "u", "p", "s"])
    assert evaluate_run(tmp_path / "run", data=swapped)["last"] == found["last"]
    with pytest.raises(DataError, match="no column u"):
        evaluate_run(tmp_path / "run", data=write(tmp_path / "x.csv", rows, ["y", "v", "p", "s"]))


def test_what_is_odd_in_a_plain_table_is_refused(tmp_path: Path) -> None:
    rows = [{"": place, "site": "ns"[place % 2], "a": place, "y": place % 2} for place in range(12)]
    numbered = write(tmp_path / "numbered.csv", rows)  # as pandas writes it
    with pytest.raises(DataError, match="a column has no name"):
        from_table(numbered, "site", "y")
    assert from_table(numbered, "site", "y", ["a"]).features == ("a",)
    rows[3]["site"] = ""
    with pytest.raises(DataError, match=r"column site names no client in row 3 \(first row is 0\)"):
        from_table(write(tmp_path / "nobody.csv", rows), "site", "y", ["a"])
    (tmp_path / "latin.csv").write_bytes("site,a,y\nVardø,1,0\nOslo,2,1\n".encode("latin-1"))
    with pytest.raises(DataError, match="column site has a text that is not in UTF-8"):
        from_table(tmp_path / "latin.csv", "site", "y")
    held = {"site": ["Vardø".encode()] * 4, "a": [1, 2, 3, 4], "y": [0, 1, 0, 1], "scan": [b"\xff"] * 4}
    pyarrow.parquet.write_table(pyarrow.table(held), tmp_path / "bytes.parquet")
    assert from_table(tmp_path / "bytes.parquet", "site", "y", ["a"]).names == ("Vardø",)


def test_a_line_break_within_a_text_ends_no_row(tmp_path: Path) -> None:
    rows = 9000  # more than are read at a time
    note = "a cough,\n" * 30
    lines = [f'"{note}",{place},{place % 2}\n' for place in range(rows)]
    (tmp_path / "t.csv").write_text("note,a,y\n" + "".join(lines))
    assert (tmp_path / "t.csv").stat().st_size > 1 << 20
    for texts in (None, ()):
        held = read_table(tmp_path / "t.csv", texts)
        assert list(map(int, held["a"].to_pylist())) == list(range(rows))


def test_a_run_remembers_the_columns_of_a_plain_table(tmp_path: Path) -> None:
    rows = [{"s": "ab"[place % 2], "v": place, "u": 0, "y": place // 2 % 2} for place in range(12)]
    words = ["data.client_column=s", "data.label_column=y", f"data.path={write(tmp_path / 't.csv', rows)}"]
    execute(load(None, [*words, "model.name=softmax"], rounds=0), out=tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").experiment.data.feature_columns == ("v", "u")


def test_data_given_in_python_are_normalised_where_that_is_said() -> None:
    random = np.random.default_rng(0)
    clients = {name: (random.normal(50, 9, (30, 2)), np.arange(30) % 2) for name in "ab"}
    given: dict[str, Any] = {"model": "softmax", "rounds": 1, "store": False, "engine": "loop"}
    said = sartor.run("fedavg", data=clients, experiment={"data": {"normalise": True}}, **given)
    from sartor.data import prepare

    by_hand = sartor.run("fedavg", data=prepare(from_clients(clients), normalise=True), **given)
    plain = sartor.run("fedavg", data=clients, **given)
    assert torch.equal(said.w, by_hand.w)
    assert not torch.equal(said.w, plain.w)
