"""Experiments: whatever is written in one is either taken as written or refused with a message about it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from sartor.data.schema import Column
from sartor.errors import SettingError
from sartor.federation.transforms import TRANSFORMS
from sartor.model.groups import ModelGroup
from sartor.runs import experiment as module
from sartor.runs.experiment import (
    Experiment,
    describe_settings,
    fingerprint,
    from_mapping,
    load,
    read_toml,
    to_mapping,
    to_toml,
)
from sartor.settings import Meaning, build, meaning, setting

SECTIONS = tuple(module._SECTIONS)
CHOICES = module._CHOICES
ALGORITHMS = sorted(module.registered())
KINDS = {section: dict(module._registry(section)) for section in CHOICES}
KINDS["algorithm"] = {name: algorithm.Hyper for name, algorithm in module.registered().items()}
ROWS = describe_settings()
KEYS = sorted({row.key for row in ROWS})
quick = settings(max_examples=40, suppress_health_check=list(HealthCheck))


# -- what the settings allow, as strategies ---------------------------------------------------------


def values_of(hint: Any, allowed: Meaning) -> st.SearchStrategy[Any]:
    """All values a declared setting takes."""
    options = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return st.one_of([values_of(option, allowed) for option in options if option is not types.NoneType])
    if typing.get_origin(hint) in (list, tuple):
        return st.lists(values_of(options[0], allowed), max_size=3)
    if allowed.choices is not None:
        return st.sampled_from(allowed.choices)
    low = allowed.low if allowed.low is not None else allowed.above
    high = allowed.high if allowed.high is not None else allowed.below
    if hint is bool:
        return st.booleans()
    if hint is int:
        numbers: st.SearchStrategy[Any] = st.integers(
            -(2**63) if low is None else math.ceil(low), 2**63 - 1 if high is None else math.floor(high)
        )
        return numbers.filter(allowed.accepts)
    if hint is float:
        return st.floats(low, high, allow_nan=False, allow_infinity=False).filter(allowed.accepts)
    if hint is Any:
        return st.lists(st.text(max_size=3), max_size=3)
    assert hint is str, f"no strategy for {hint}"
    if allowed.words:
        return st.sampled_from(allowed.words)
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def tables(draw: st.DrawFn, cls: type, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Some of the keys of a settings dataclass with values it takes."""
    hints = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.init and field.name not in skip]
    chosen = draw(st.lists(st.sampled_from(fields), unique_by=lambda field: field.name)) if fields else []
    return {field.name: draw(values_of(hints[field.name], meaning(field))) for field in chosen}


@st.composite
def privacy_of(draw: st.DrawFn, table: dict[str, Any]) -> dict[str, Any]:
    """Of privacy's settings those that go together: a mode with a budget or a noise, or none of them."""
    mode = draw(st.sampled_from([None, "central", "local", "samples"]))
    alone = ("mode", "epsilon", "noise", "quantile", "count_noise", "calibrated")
    rest = {key: value for key, value in table.items() if key not in alone}
    if mode is None:
        return rest
    return {**rest, "mode": mode, draw(st.sampled_from(["epsilon", "noise"])): draw(st.floats(0.01, 99))}


@st.composite
def mappings(draw: st.DrawFn) -> dict[str, Any]:
    """Experiments as a user may write them, right in every setting: of more than a few sections hardly any
    go together.
    """
    algorithm = draw(st.sampled_from(ALGORITHMS))
    mapping: dict[str, Any] = {"algorithm": algorithm, "hyper": draw(tables(KINDS["algorithm"][algorithm]))}
    mapping |= draw(
        tables(
            Experiment, skip=("algorithm", "imports", "transforms", "models", "columns", *SECTIONS, "hyper")
        )
    )
    for section in draw(st.lists(st.sampled_from(SECTIONS), max_size=4, unique=True)):
        cls = module._SECTIONS[section]
        # Code would have to be there, and tokens are those of a text.
        code = ("path", "head") if section in ("model", "objective") else ()
        code = ("text_column", "tokens", "length", "vocabulary") if section == "data" else code
        table = draw(tables(cls, skip=("name", "settings", *code) if section != "engine" else ()))
        if section == "privacy":
            table = draw(privacy_of(table))
        if section in CHOICES:
            table["name"] = draw(st.sampled_from(sorted(KINDS[section])))
            table |= draw(tables(KINDS[section][table["name"]]))
        mapping[section] = table
    names = draw(st.lists(st.sampled_from(["clip", "scale"]), max_size=3))
    mapping["transforms"] = [{"name": name, **draw(tables(TRANSFORMS[name]))} for name in names]
    every = draw(st.lists(st.integers(1, 9), max_size=2))
    mapping["models"] = [
        {"name": "mlp", **draw(tables(KINDS["model"]["mlp"])), "every": number} for number in every
    ]
    return mapping


def valid(mapping: dict[str, Any]) -> Experiment:
    """The experiment of a mapping, unless settings that are right alone contradict each other."""
    try:
        return from_mapping(mapping)
    except SettingError:
        assume(False)
        raise


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.just(10**400),
        st.floats(),
        st.text(max_size=10),
        st.just("\udcff"),
        st.binary(max_size=3),
        st.dates(),
        st.just(object()),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
part_names = sorted({part for key in KEYS for part in key.split(".")})
words = st.one_of(st.sampled_from(part_names), st.text(max_size=8))


# -- round trips ------------------------------------------------------------------------------------


@quick
@given(mappings())
def test_a_valid_experiment_survives_being_written_and_read(
    tmp_path_factory: Any, mapping: dict[str, Any]
) -> None:
    experiment = valid(mapping)
    path = tmp_path_factory.mktemp("toml") / "experiment.toml"
    path.write_bytes(to_toml(experiment).encode())
    again = load(path)
    assert again == experiment
    assert fingerprint(again) == fingerprint(experiment)
    assert to_mapping(again) == to_mapping(experiment) == read_toml(path)
    for key, value in mapping.items():
        if not isinstance(value, dict) and key not in ("transforms", "models"):
            assert getattr(experiment, key) == value
    assert [type(made) for made in experiment.transforms] == [
        TRANSFORMS[entry["name"]] for entry in mapping["transforms"]
    ]


def test_every_character_survives_being_written_and_read(tmp_path: Path) -> None:
    text = "".join(map(chr, range(0x100))) + "\u2028\ufeff\U0001f600"
    path = tmp_path / "experiment.toml"
    path.write_bytes(to_toml(from_mapping({"data": {"path": text}})).encode())
    assert load(path).data.path == text


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_bytes(b"\xef\xbb\xbfrounds = 3")
    assert load(path).rounds == 3


@quick
@given(mappings(), st.data())
def test_every_setting_counts_in_the_fingerprint(mapping: dict[str, Any], data: st.DataObject) -> None:
    experiment = valid(mapping)
    stored = to_mapping(experiment)
    sections = [name for name in (*SECTIONS, "hyper") if stored[name] and name != "tracking"]
    section = data.draw(st.sampled_from(sections))
    key = data.draw(st.sampled_from([key for key in stored[section] if key != "name"] or ["name"]))
    kind = {**module._SECTIONS, "hyper": type(experiment.hyper)}[section]
    if section in CHOICES and key not in module._common(kind):
        kind = type(getattr(experiment, section).settings)
    field = next(field for field in dataclasses.fields(kind) if field.name == key)
    assume(key != "name")
    value = data.draw(values_of(typing.get_type_hints(kind)[key], meaning(field)))
    assume(value != stored[section][key])
    changed = valid({**stored, section: {**stored[section], key: value}})
    assert fingerprint(changed) != fingerprint(experiment)


def others(value: Any) -> list[Any]:
    """Values like this one, of which a setting may take some."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value / 2, value + 1, value - 1, value * 2, int(value / 2), 0, 1, 2, 0.5]
    return [1, 0.5, "yes", "x", ["x"], [1], ["flip"], "steps", "cosine", "float64", "equal", "median"]


def test_no_key_of_the_defaults_is_left_out_of_the_fingerprint() -> None:
    """One after the other; above, those of all that can be chosen by name, by chance."""
    experiment = from_mapping({})
    stored, left = to_mapping(experiment), []
    for section in (*SECTIONS, "hyper"):
        for key in stored[section] if section != "tracking" else ():
            seen = set()
            for value in others(stored[section][key]):
                with contextlib.suppress(SettingError):
                    changed = from_mapping({**stored, section: {**stored[section], key: value}})
                    if to_mapping(changed) != stored:
                        seen.add(fingerprint(changed))
            if fingerprint(experiment) in seen or not seen:
                left.append((f"{section}.{key}", bool(seen)))
    assert [key for key, tried in left if tried] == []
    assert len(left) < 25  # few take none of these values


def test_where_a_run_is_shown_does_not_change_the_fingerprint() -> None:
    shown = from_mapping({"tracking": {"loggers": ["tensorboard"]}})
    assert to_mapping(shown)["tracking"] == {"loggers": ["tensorboard"]}
    assert fingerprint(shown) == fingerprint(from_mapping({}))


def test_the_order_of_keys_does_not_change_the_fingerprint() -> None:
    one = from_mapping({"rounds": 3, "data": {"clients": 5, "validation": 0.1}})
    two = from_mapping({"data": {"validation": 0.1, "clients": 5}, "rounds": 3})
    assert fingerprint(one) == fingerprint(two)


def test_the_defaults_of_every_algorithm_are_an_experiment() -> None:
    for algorithm in ALGORITHMS:
        assert refused(from_mapping, {"algorithm": algorithm}) == "", algorithm
        assert from_mapping({"algorithm": algorithm}).hyper == KINDS["algorithm"][algorithm](), algorithm


@pytest.mark.parametrize("section", CHOICES)
def test_the_settings_of_a_choice_do_not_clash_with_its_common_keys(section: str) -> None:
    for name, kind in KINDS[section].items():
        clash = module._common(module._SECTIONS[section]) & {field.name for field in dataclasses.fields(kind)}
        assert not clash, f"{section} {name}"


# -- bad input --------------------------------------------------------------------------------------


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(
        st.one_of(words, st.integers(), st.none()),
        st.one_of(anything, st.dictionaries(st.one_of(words, st.integers()), anything, max_size=4)),
        max_size=4,
    )
)
@example({"seed": 2**63})
@example({"partition": {"name": "column", "values": [datetime.date(2020, 1, 1)]}})
@example({"partition": {"name": "column", "values": [[1], [1, 2]]}})
@example({"hyper": {"lr": 10**400}})
@example({"data": {"path": "\udcff"}})
def test_any_mapping_is_an_experiment_or_a_setting_error(mapping: dict[Any, Any]) -> None:
    try:
        experiment = from_mapping(mapping)
    except SettingError:
        return
    assert from_mapping(to_mapping(experiment)) == experiment
    to_toml(experiment).encode()


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(ROWS), anything)
def test_any_value_of_a_known_key_is_taken_or_refused_by_name(row: module.Setting, value: Any) -> None:
    mapping: dict[str, Any] = {}
    for key, entry in ([tuple(row.only_for.split(" = "))] if row.only_for else []) + [(row.key, value)]:
        module._assign(mapping, key, entry)
    try:
        experiment = from_mapping(mapping)
    except SettingError as error:
        message = str(error)
        assert row.key.split(".")[-1] in message
        return
    assert from_mapping(to_mapping(experiment)) == experiment


@pytest.mark.parametrize(
    "mapping",
    [
        {"rounds": 1 << 20_000},
        {"hyper": {"lr": 1 << 20_000}},
        {"partition": {"name": "column", "values": [[1 << 20_000]]}},
        {1 << 20_000: 1},
        {"data": {1 << 20_000: 1}},
        {"data": [1 << 20_000]},
    ],
    ids=range(6),
)
def test_a_number_of_too_many_digits_to_print_is_refused(mapping: dict[Any, Any]) -> None:
    with pytest.raises(SettingError, match="too large to show"):
        from_mapping(mapping)


def test_values_nested_too_deeply_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for mapping in ({"rounds": deep}, {"data": deep}, {"partition": {"name": "column", "values": deep}}):
        with pytest.raises(SettingError):
            from_mapping(mapping)


@quick
@given(anything)
def test_anything_that_is_no_table_is_refused(value: Any) -> None:
    assume(not isinstance(value, dict))
    with pytest.raises(SettingError):
        from_mapping(value)
    assume(value is not None)
    for section in (*SECTIONS, "hyper"):
        with pytest.raises(SettingError, match=rf"^{section}: expected a table.*\[{section}\]"):
            from_mapping({section: value})


@quick
@given(mappings(), st.sampled_from(["", *SECTIONS, "hyper"]), st.text(min_size=1, max_size=8))
def test_an_unknown_key_is_refused_anywhere(mapping: dict[str, Any], section: str, key: str) -> None:
    valid(mapping)
    assume(key not in part_names)
    table = mapping if not section else mapping.setdefault(section, {})
    table[key] = 1
    with pytest.raises(SettingError, match="unknown key"):
        from_mapping(mapping)


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(
        st.text(),
        st.lists(st.tuples(words, words), max_size=4).map(
            lambda pairs: "\n".join(
                f"[{left}]" if right == "name" else f"{left} = {right}" for left, right in pairs
            )
        ),
    ).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.binary()
)
@example(b"\xff\xfe")
@example(b"x = " + b"[" * 50_000)
@example(b"rounds = " + b"9" * 5_000)
@example(b"rounds = 0x" + b"f" * 5_000)
@example(b"rounds = 2020-99-99")
@example(b"")
def test_any_file_is_an_experiment_or_a_setting_error(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.mktemp("toml") / "experiment.toml"
    path.write_bytes(content)
    with contextlib.suppress(SettingError):
        assert isinstance(load(path), Experiment)


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.one_of(
            st.text(),
            st.builds("{}={}".format, st.sampled_from(KEYS), st.text(max_size=8)),
            st.builds("{}.{}={}".format, words, words, words),
        ),
        max_size=3,
    )
)
@example(["hyper.lr=" + "[" * 50_000])
@example(["rounds=" + "9" * 5_000])
@example(["rounds=1\n[data]\nclients=3"])
@example(["data.path=\udcff"])
@example(["=", "=1", ".=1", "a.=1", "rounds"])
@example(["rounds.x=1"])
@example(["hyper.lr.x=1", "hyper.lr=1"])
@example(["hyper.lr=1", "hyper.lr.x=1"])
def test_any_overrides_are_an_experiment_or_a_setting_error(overrides: list[str]) -> None:
    with contextlib.suppress(SettingError):
        assert isinstance(load(None, overrides), Experiment)


def bounded() -> Iterator[tuple[dict[str, Any], str, str, Any]]:
    """Every bound of every setting: the table around it, its key, and a value just outside."""
    groups: list[tuple[str, type, dict[str, Any]]] = [("", Experiment, {})]
    groups += [(section, cls, {}) for section, cls in module._SECTIONS.items()]
    groups += [(s, kind, {s: {"name": name}}) for s in CHOICES for name, kind in KINDS[s].items()]
    groups += [("hyper", kind, {"algorithm": name}) for name, kind in KINDS["algorithm"].items()]
    for section, cls, base in groups:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            allowed = meaning(field)
            is_list = typing.get_origin(hints[field.name]) in (list, tuple)
            outside: list[Any] = []
            if allowed.choices is not None:
                outside = ["no such choice" if isinstance(allowed.choices[0], str) else 987654]
            outside += [] if allowed.low is None else [allowed.low - 1]
            outside += [] if allowed.high is None else [allowed.high + 1]
            outside += [bound for bound in (allowed.above, allowed.below) if bound is not None]
            for value in outside:
                yield base, section, field.name, [value] if is_list else value


def test_a_value_outside_its_range_is_refused_by_name() -> None:
    cases = list(bounded())
    assert len(cases) > 800
    for base, section, key, value in cases:
        outside = {section: {**base.get(section, {}), key: value}} if section else {key: value}
        place = f"{section}.{key}" if section else key
        assert refused(from_mapping, {**base, **outside}).startswith(f"{place}: "), (
            f"{base} {place} = {value}"
        )


def refused(make: Callable[..., Experiment], *given: Any) -> str:
    """What is said against an experiment; nothing where it is taken."""
    try:
        make(*given)
    except SettingError as error:
        return str(error)
    return ""


LISTED = ("transforms.", "models.", "columns.", "local.augment.")
ALONE = sorted({row.key for row in ROWS if row.type != "any value" and not row.key.startswith(LISTED)})
"""Settings that are given one by one; those of lists and of columns are not."""


def test_a_value_of_the_wrong_type_is_refused_by_name() -> None:
    assert len(ALONE) > 300
    for key in ALONE:
        row = next(row for row in ROWS if row.key == key)
        choice = row.only_for.replace(" ", "").split("=")
        base = [f'{choice[0]}="{choice[1]}"'] if row.only_for else []
        for wrong in ("{}", "1979-05-27"):
            said = refused(load, None, [*base, f"{key}={wrong}"])
            assert said.startswith(f"{key}: expected {row.type.split(' ')[0]}"), f"{key} = {wrong}"


# -- the words of a message -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"data": {"clinets": 3}}, "data.clinets: unknown key; did you mean data.clients?"),
        ({"roundz": 3}, "roundz: unknown key; did you mean rounds?"),
        ({"dta": {}}, "dta: unknown key; did you mean data?"),
        ({"algorithm": "fedvag"}, "algorithm = 'fedvag': unknown name; did you mean fedavg?"),
        (
            {"partition": {"name": "dirchlet"}},
            "partition.name = 'dirchlet': unknown name; did you mean dirichlet?",
        ),
        ({"data": {"name": "digit"}}, "data.name = 'digit': unknown name; did you mean digits?"),
        ({"rounds": -1}, "rounds: must be at least 0, got -1"),
        ({"rounds": 1.5}, "rounds: expected a whole number (at least 0), got 1.5"),
        ({"local": {"momentum": 1}}, "local.momentum: must be at least 0, below 1, got 1.0"),
        ({"epochs": 3}, "epochs: unknown key; did you mean local.epochs?"),
        ({"local": {"seed": 3}}, "local.seed: unknown key; did you mean seed?"),
        ({"cohort": {"count": 21}}, "cohort.count: must be at most data.clients = 20, got 21"),
        ({"data": {"client_column": "c"}}, "data.client_column: only for own data; give data.path too"),
    ],
)
def test_messages_say_what_where_and_what_to_do(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        from_mapping(mapping)
    assert str(caught.value) == message


def test_an_unknown_key_of_a_choice_says_which_choice_it_was() -> None:
    with pytest.raises(SettingError, match=r"partition.alpha: unknown key.*\(partition.name is iid\)"):
        from_mapping({"partition": {"name": "iid", "alpha": 1.0}})
    with pytest.raises(SettingError, match=r"hyper.zzzzz: unknown key.*\(algorithm is fedavg\)"):
        from_mapping({"hyper": {"zzzzz": 1.0}})


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text("rounds = 3\n\nseed = = 4\n")
    with pytest.raises(SettingError, match=r"experiment\.toml: not a TOML experiment: .*line 3"):
        load(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such experiment file"),
        (lambda path: path.mkdir(), "cannot be read"),
        (lambda path: path.write_bytes(b"# caf\xe9"), "not UTF-8 text .byte 5"),
        (lambda path: path.write_bytes(b"x = " + b"[" * 50_000), "nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, make: Any, message: str) -> None:
    path = tmp_path / "experiment.toml"
    make(path)
    with pytest.raises(SettingError, match=rf"experiment\.toml: .*{message}"):
        load(path)


# -- overrides --------------------------------------------------------------------------------------


def test_overrides_and_keywords_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('rounds = 3\nseed = 4\n[data]\nname = "digits"\nclients = 7\n[cohort]\nfraction = 0.5\n')
    experiment = load(path, ["data.clients=9", "cohort.fraction=0.1"], rounds=5, **{"data.validation": 0.25})
    assert (experiment.rounds, experiment.seed, experiment.data.clients) == (5, 4, 9)
    assert (experiment.cohort.fraction, experiment.data.validation) == (0.1, 0.25)


def test_an_override_is_a_toml_value_or_else_a_bare_text() -> None:
    for text in ("partition.name=iid", 'partition.name="iid"', " partition.name = iid "):
        assert load(None, [text]).partition.name == "iid"
    assert load(None, ["data.normalise=false"]).data.normalise is False
    assert load(None, ["data.path=a#b=c"]).data.path == "a#b=c"
    assert load(None, ["data.path=1\nrounds=2"]).data.path == "1\nrounds=2"
    assert load(None, ["evaluate.personal_pooled=no"]).evaluate.personal_pooled == "no"


def test_one_key_given_twice_must_agree() -> None:
    assert load(None, ["rounds=5", "rounds=5"], rounds=5).rounds == 5
    with pytest.raises(SettingError, match="rounds: given twice, as 5 and as 6"):
        load(None, ["rounds=5"], rounds=6)
    with pytest.raises(SettingError, match=r"data\.clients: given twice"):
        load(None, ["data.clients=5", "data.clients=6"])


def test_a_whole_section_cannot_be_overridden_at_once() -> None:
    with pytest.raises(SettingError, match="data: is a table"):
        load(None, ["data={clients=3}"])


def test_none_stands_for_the_default() -> None:
    assert from_mapping({"rounds": None, "data": {"clients": None}, "hyper": None}) == from_mapping({})


# -- the list of settings ---------------------------------------------------------------------------


def test_the_list_of_settings_has_every_key_with_its_default() -> None:
    listed = {row.key: row for row in ROWS if not row.only_for}
    experiment = from_mapping({})
    assert {key.split(".")[0] for key in listed} == {
        *("algorithm", "rounds", "seed", "imports", "models", "columns"),
        *SECTIONS,
    }
    for key, row in listed.items():
        in_list = {"models": 1, "columns": 2}.get(key.split(".")[0], 0)
        value: Any = [experiment, ModelGroup(choice=experiment.model), Column("age")][in_list]
        for part in key.split(".")[in_list:]:
            value = getattr(value, part)
        assert (list(value) if isinstance(value, tuple) else value) == row.default, key
    for algorithm in ALGORITHMS:
        hyper = {row.key for row in ROWS if row.only_for == f"algorithm = {algorithm}"}
        assert hyper == {f"hyper.{field.name}" for field in dataclasses.fields(KINDS["algorithm"][algorithm])}


def test_the_page_for_users_names_every_setting_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text(encoding="utf-8")
    heads = {"": "### Top level", "models": "### `[[models]]`", "columns.NAME": "### `[columns]`"}
    heads |= {section: f"### `[{section}]`" for section in SECTIONS}
    for row in ROWS:
        if row.only_for:
            continue
        section, _, leaf = row.key.rpartition(".")
        part = page.split(f"{heads[section]}\n")[1].split("\n### ")[0]
        default = "none" if row.default is None else f"`{module._toml(row.default)}`"
        assert f"| `{leaf}` | {default} |" in part or f'`{leaf} = "{row.default}"` (the default)' in part, (
            row.key
        )


# -- settings: the parts experiments rest on --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Example:
    share: float = setting(0.5, "a share", low=0, below=1)
    sizes: tuple[int, ...] = setting((1,), "sizes", low=1)
    weights: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Needy:
    size: int


def test_bounds_hold_for_every_entry_of_a_list_and_a_table() -> None:
    assert build(Example, {"sizes": [1, 2], "weights": {"a": 1}}, "e") == Example(0.5, (1, 2), {"a": 1.0})
    with pytest.raises(SettingError, match=r"e\.sizes: must be at least 1"):
        build(Example, {"sizes": [1, 0]}, "e")
    with pytest.raises(SettingError, match=r"e\.weights: expected a table"):
        build(Example, {"weights": {"a": "b"}}, "e")
    with pytest.raises(SettingError, match=r"e\.share: must be at least 0, below 1"):
        build(Example, {"share": 1}, "e")


def test_a_required_setting_that_is_missing_is_named() -> None:
    with pytest.raises(SettingError, match=r"e\.size: missing; give a whole number"):
        build(Needy, {}, "e")
