"""The command line: words become the right experiment, results go where they belong, errors are brief."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flower_processes import program
from typer.testing import CliRunner

from helpers import METHODS, completed
from owned import ALGORITHM, DATA, MODEL, forgetful
from sartor.algorithms import registered
from sartor.commands.main import app, main
from sartor.data.partitions import describe, make_partition
from sartor.data.sources import load_source
from sartor.errors import SartorError
from sartor.runs.experiment import Experiment, describe_settings, from_mapping, load
from sartor.runs.setup import load_data
from sartor.studies import presets

__all__ = ["forgetful"]

cli = CliRunner()

SUMMARY: dict[str, Any] = {
    "algorithm": "fedavg",
    "data": "digits",
    "clients": 20,
    "rounds": 30,
    "headline": "accuracy",
    "last": {
        "shared_local": {
            "accuracy": 0.75,
            "accuracy_weighted": 0.5,
            "accuracy_spread": {"worst_decile": 0.25},
            "loss": 1.5,
        },
        "personal_local": None,
    },
    "best_by_validation": {"shared_local": None, "personal_local": None},
    "best_on_test": {"shared_local": {"accuracy": 0.875, "round": 3}, "personal_local": None},
    "bytes_down": 1000,
    "bytes_up": 1000,
    "seconds": float("nan"),
}


def call(*arguments: str) -> Any:
    return cli.invoke(app, list(arguments), prog_name="sartor")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Experiment, Path | None]]:
    """The experiments handed over to be executed, which are not."""
    calls: list[tuple[Experiment, Path | None]] = []

    def execute(experiment: Experiment, *, out: Path | None, progress: bool) -> Any:
        calls.append((experiment, out))
        return SimpleNamespace(summary=SUMMARY, folder=Path("runs/a"))

    monkeypatch.setattr("sartor.runs.execute.execute", execute)
    return calls


# -- run -----------------------------------------------------------------------------------------------


def test_flags_and_settings_may_stand_anywhere(started: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text("rounds = 3\nseed = 1\n[data]\nclients = 7\n[local]\nepochs = 2\n")
    wanted = from_mapping(
        {
            "rounds": 5,
            "seed": 1,
            "data": {"clients": 9, "name": "digits"},
            "local": {"epochs": 2, "batch": 8},
            "engine": {"name": "loop", "device": "cpu"},
        }
    )
    flags = ["--rounds", "5", "--clients=9", "--data", "digits", "--engine", "loop", "--device", "cpu"]
    for words in (
        ["fedavg", str(path), "local.batch=8", *flags],
        [*flags, "fedavg", str(path), "local.batch=8"],
        [*flags[:2], "fedavg", *flags[2:], "local.batch=8", str(path)],
        [str(path), "fedavg", "local.batch=8", *flags],
        [str(path), "local.batch=8", *flags],
    ):
        result = call("run", *words, "--out", str(tmp_path / "out"))
        assert result.exit_code == 0, result.output
        assert started.pop() == (wanted, tmp_path / "out")


def test_the_algorithm_named_wins_over_the_file(started: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('algorithm = "fedavg"\n')
    call("run", "separate", str(path))
    call("run", str(path))
    assert [experiment.algorithm for experiment, _ in started] == ["separate", "fedavg"]


def test_json_is_the_last_line_and_strict(started: list[Any]) -> None:
    result = call("run", "fedavg", "--json")
    assert json.loads(result.stdout.splitlines()[-1]) == {**SUMMARY, "seconds": None}


def test_a_table_shows_the_result_and_the_folder(started: list[Any]) -> None:
    result = call("run", "fedavg")
    assert ["shared", "local", "0.75", "0.5", "0.25", "1.5", "-", "0.875"] in [
        line.split() for line in result.stdout.splitlines()
    ]
    assert "personal" not in result.stdout
    assert result.stdout.splitlines()[-1] == f"run folder: {Path('runs/a')}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fedvag"], "algorithm = 'fedvag': unknown name; did you mean fedavg?"),
        (["fedavg", "data.clinets=3"], "data.clinets: unknown key; did you mean data.clients?"),
        (["fedavg", "--clients", "0"], "data.clients: must be at least 1, got 0"),
        (["fedavg", "--rounds", "3", "rounds=4"], "rounds: given twice, as 4 and as 3; give it once"),
        (
            ["fedavg", "algorithm=separate"],
            "algorithm: given twice, as 'separate' and as 'fedavg'; give it once",
        ),
        (["fedavg", "nowhere.toml"], "nowhere.toml: no such experiment file"),
        (
            ["fedavg", "separate"],
            "'separate': expected one algorithm, one experiment (a .toml file or a preset), and key=value",
        ),
        (
            ["a.toml", "b.toml"],
            "'b.toml': expected one experiment (a .toml file or a preset), and key=value",
        ),
        (["rounds=3"], "name an algorithm or an experiment file, as in `sartor run fedavg`"),
        (["fedavg", "--engine", "stakced"], "engine.name: must be one of auto, loop, stacked, got 'stakced'"),
    ],
)
def test_a_mistake_is_one_message_and_nothing_starts(
    started: list[Any], words: list[str], message: str
) -> None:
    result = call("run", *words)
    assert (result.exit_code, result.stderr, result.stdout) == (2, f"sartor: {message}\n", "")
    assert not started


def test_the_same_setting_given_twice_alike_is_fine(started: list[Any]) -> None:
    assert call("run", "fedavg", "--rounds", "4", "rounds=4").exit_code == 0


@pytest.mark.parametrize(
    "words", [["run"], ["rum"], ["run", "fedavg", "--clients", "x"], ["run", "fedavg", "--nope"]]
)
def test_wrong_usage_ends_with_status_2(words: list[str]) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert "Error" in result.stderr


def failing(error: BaseException) -> Any:
    def execute(*arguments: Any, **keywords: Any) -> Any:
        raise error

    return execute


def test_an_error_while_running_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sartor.runs.execute.execute", failing(SartorError("round 3: the disk is full")))
    result = call("run", "fedavg")
    assert (result.exit_code, result.stderr) == (2, "sartor: round 3: the disk is full\n")


def test_an_interruption_is_a_short_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sartor.runs.execute.execute", failing(KeyboardInterrupt()))
    result = call("run", "fedavg")
    assert (result.exit_code, result.stderr) == (130, "sartor: stopped\n")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ZeroDivisionError("a bug")
    monkeypatch.setattr("sartor.runs.execute.execute", failing(error))
    assert call("run", "fedavg").exception is error


# -- the program itself --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_stores_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("run", "fedavg", "--rounds", "2", "--clients", "3", "--out", "run", "--json")
    done = completed([str(program(tmp_path)), *words], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stored = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert stored.pop("seal").startswith("crc32:")
    assert json.loads(done.stdout.splitlines()[-1]) == stored
    monkeypatch.chdir(tmp_path)
    again = call(*words)
    assert (again.exit_code, again.stdout) == (2, "")
    assert (
        again.stderr == "sartor: run: already holds a run (config.toml); give another folder or remove it\n"
    )


def test_an_error_in_the_process_has_no_traceback(tmp_path: Path) -> None:
    done = completed([str(program(tmp_path)), "run", "fedavg", "data.path=\udcff"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("sartor: data.path: expected a text")
    assert done.stderr.count("\n") == 1


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, runpy; sys.argv = ['sartor', '--help']\n"
        "try: runpy.run_module('sartor', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'sklearn', 'matplotlib', 'plotly', 'safetensors'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    done = completed([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("run", "algorithms", "settings", "data"))


def test_symbols_do_not_end_a_run_on_a_plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["sartor", "algorithms", "fedavg"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert b"\\u03b7" in shown.getvalue()
    assert "η" in call("algorithms", "fedavg").stdout


# -- lists ---------------------------------------------------------------------------------------------


def test_algorithms_lists_each_one_with_what_it_keeps_where() -> None:
    cards = json.loads(call("algorithms", "--json").stdout)
    assert [card["name"] for card in cards] == sorted(registered())
    table = call("algorithms").stdout
    for card in cards:
        assert card["name"] in table
        assert all(
            card[key] for key in ("summary", "family", "paper", "server_keeps", "client_keeps", "traffic")
        )


@pytest.fixture(scope="module")
def every_setting() -> Any:
    return describe_settings()


@pytest.mark.parametrize("name", METHODS)
def test_an_algorithm_shows_its_hyper_parameters(name: str, every_setting: Any) -> None:
    card = json.loads(call("algorithms", name, "--json").stdout)
    rows = [row for row in every_setting if row.only_for == f"algorithm = {name}"]
    assert [(row["key"], row["default"]) for row in card["hyper"]] == [(row.key, row.default) for row in rows]
    if name in ("fedavg", "scaffold", "spfl", "ma-fsvrg", "fedbuff", "fedrep"):  # all are printed alike
        table = call("algorithms", name).stdout
        assert all(row.key in table for row in rows)


def test_an_unknown_algorithm_is_guessed() -> None:
    result = call("algorithms", "fedvag")
    assert (result.exit_code, result.stderr) == (
        2,
        "sartor: algorithm = 'fedvag': unknown name; did you mean fedavg?\n",
    )


def test_settings_lists_every_setting_or_those_of_a_section() -> None:
    rows = json.loads(call("settings", "--json").stdout)
    known = [row["key"] for row in rows]
    assert [key for key in known if not key.startswith("policy.")] == [row.key for row in describe_settings()]
    assert "policy.least_batch" in known
    some = json.loads(call("settings", "local", "--json").stdout)
    assert some == [row for row in rows if row["key"].startswith("local.")]
    assert [row["key"] for row in json.loads(call("settings", "rounds", "--json").stdout)] == ["rounds"]
    table = call("settings").stdout
    assert all(row["key"] in table for row in rows)
    assert call("settings", "lokal").stderr == "sartor: lokal: unknown key; did you mean local?\n"


# -- data ----------------------------------------------------------------------------------------------


def test_data_shows_the_partition_a_run_would_use(tmp_path: Path) -> None:
    picture = tmp_path / "dots.png"
    scheme = {"name": "dirichlet", "alpha": 0.1}
    partition = make_partition(load_source("digits"), scheme, clients=4, seed=3)
    flags = ["--partition", "dirichlet", "--clients", "4", "--seed", "3", "--json"]
    for words in (
        ["digits", "--alpha", "0.1", "--plot", str(picture), *flags],
        ["--alpha=0.1", "digits", *flags],
        [*flags, "digits", "partition.alpha=0.1"],
    ):
        result = call("data", *words)
        assert result.exit_code == 0, result.stderr
        shown = json.loads(result.stdout)
        assert shown["hash"] == partition.hash
        assert shown["clients"] == describe(partition)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_data_shows_a_stored_partition(tmp_path: Path) -> None:
    partition = make_partition(load_source("digits"), "iid", clients=3, seed=5)
    partition.save(tmp_path / "mine.npz")
    result = call("data", "digits", f"partition.file={tmp_path / 'mine.npz'}")
    assert result.stdout.splitlines()[-1] == f"digits: 3 clients, hash {partition.hash}"


def test_a_folder_named_like_a_data_set_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert call("data", "digits", "--json").exit_code == 0


def test_data_shows_own_data(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(
        "site,a,y\n" + "".join(f"{site},{row},{row % 2}\n" for site in "ns" for row in range(10))
    )
    columns = ("data.client_column=site", "data.label_column=y")
    shown = json.loads(call("data", str(table), *columns, "--json").stdout)
    assert [(row["client"], row["train"] + row["test"]) for row in shown["clients"]] == [("n", 10), ("s", 10)]
    missing = call("data", str(table), columns[0])
    assert (missing.exit_code, missing.stderr.count("\n")) == (2, 1)
    assert "data.label_column" in missing.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dgits"], "data.name = 'dgits': unknown name; did you mean digits?"),
        (
            ["digits", "mnist"],
            "name one data set, as in `sartor data digits`; settings are given as key=value",
        ),
        (["digits", "--alpha"], "--alpha: expected a value, as in --alpha 0.1"),
        (["digits", "--alpha", "-1"], "partition.alpha: must be above 0, got -1.0"),
        (
            ["digits", "--alpha", "1", "partition.alpha=2"],
            "partition.alpha: given twice, as 1 and as 2; give it once",
        ),
        (["digits", "--alhpa", "1"], "partition.alhpa: unknown key; did you mean partition.alpha?"),
    ],
)
def test_a_mistake_about_data_is_one_message(words: list[str], message: str) -> None:
    result = call("data", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"sartor: {message}")
    assert result.stderr.count("\n") == 1


# -- one way from words to an experiment ---------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Experiment]:
    """The experiments handed to the server, which does not serve them."""
    calls: list[Experiment] = []

    def serve(experiment: Experiment, *arguments: Any, **keywords: Any) -> Any:
        calls.append(experiment)
        return SimpleNamespace(summary=SUMMARY, folder=Path("runs/a"))

    monkeypatch.setattr("sartor.remote.serve.serve", serve)
    return calls


def test_every_command_reads_presets_algorithms_and_settings_alike(
    started: list[Any], served: list[Experiment], tmp_path: Path
) -> None:
    words = ["fedprox", "comfed/digits", "rounds=3", "hyper.mu=0.5"]
    for command in ("run", "serve"):
        result = call(command, *words)
        assert result.exit_code == 0, result.stderr
    assert call("flower-app", str(tmp_path / "app"), *words).exit_code == 0
    ((experiment, _),) = started
    assert (experiment.algorithm, experiment.rounds, experiment.hyper.mu) == ("fedprox", 3, 0.5)
    assert experiment.local.momentum == 0.9  # the preset's
    assert served == [experiment]
    assert load(tmp_path / "app" / "experiment.toml") == experiment


def test_data_are_shown_as_a_preset_divides_them() -> None:
    shown = call("data", "comfed/digits", "--json")
    assert shown.exit_code == 0, shown.stderr
    experiment = load(presets.path("comfed/digits"))
    assert json.loads(shown.stdout)["hash"] == load_data(experiment)[0].hash


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["run", "fedavg", "comfed/digit"],
            "preset = 'comfed/digit': unknown name; did you mean comfed/digits?",
        ),
        (["run", "fedavg", "compare.seeds=3"], "compare.seeds=3: has no use here, is for `sartor compare`"),
        (["serve", "fedvag"], "algorithm = 'fedvag': unknown name; did you mean fedavg?"),
        (["serve", "fedavg", "ditto"], "'ditto': expected one algorithm, one experiment"),
        (
            ["serve", "data.name=mnist"],
            "data.name=mnist: has no use here, in a federation it lies at",
        ),
        (["serve", "partition.alpha=1"], "partition.alpha=1: has no use here, in a federation it lies"),
        (["serve", "delay.name=lognormal"], "delay.name=lognormal: has no use here, in a federation nodes"),
        (["serve", "lcoal.batch=3"], "lcoal: unknown key; did you mean local?"),
        (["serve", "--resume", "x", "rounds=3"], "rounds=3: --resume continues a run as it was begun"),
        (["flower-app", "DIR", "fedvag"], "algorithm = 'fedvag': unknown name; did you mean fedavg?"),
        (
            ["flower-app", "DIR", "search.budget=3"],
            "search.budget=3: has no use here, is for `sartor",
        ),
        (["data", "digits", "local.batch=3"], "local.batch=3: has no use here, it says nothing of how data"),
        (["data", "comfed/digits", "digits"], "name one data set"),
        (
            ["compare", "--algorithms", "fedavg", "fedprox.mu=x"],
            "fedprox.mu=x: fedprox is not among the",
        ),
        (
            ["compare", "--algorithms", "fedprox", "fedprox.mu=x"],
            "compare.fedprox.mu: expected a finite",
        ),
        (["compare", "--algorithms", "fedavg", "search.budget=1"], "search.budget=1: has no use here"),
        (
            ["compare", "--algorithms", "fedavg", "algorithm=ditto"],
            "algorithm=ditto: has no use here",
        ),
        (
            ["compare", "--algorithms", "fedavg", "--no-references", "separate.lr=1"],
            "separate.lr=1: separate",
        ),
        (["search", "--algorithms", "fedavg", "fedprox.mu=[1]"], "fedprox.mu=[1]: fedprox is not among"),
        (["search", "--algorithms", "fedavg", "compare.seeds=1"], "compare.seeds=1: has no use here"),
        (["search", "fedavg"], "'fedavg': expected one experiment"),
        (["reproduce", "comfed/table4", "compare.seeds=1"], "compare.seeds=1: has no use here"),
        (["run", "fedavg", "data.path=missing"], "data.path = 'missing': no such file or folder"),
        (["algorithms", "--import", "nowhere.py"], "/nowhere.py: no such file to import"),
        (["run", "fedavg", "--import", "nowhere"], "nowhere: no such installed module"),
    ],
)
def test_a_word_without_use_is_an_error_that_names_it(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*words)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr
    assert result.stderr.startswith("sartor: ")
    assert not list(tmp_path.iterdir())


def test_a_command_that_is_not_known_is_guessed_once() -> None:
    assert call("rnu").stderr.count("Did you mean 'run'?") == 1
    assert "There are algorithms, audit, compare" in call("xyzzy").stderr


def test_own_code_is_imported_before_the_words_are_read(
    forgetful: None, started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ALGORITHM + MODEL + DATA)
    (tmp_path / "other.py").write_text("1 / 0\n")
    own = ("--import", "mine.py")
    for words in (["algorithms", "own-avg"], ["settings", "model"], ["data", "own-blobs", "--clients", "2"]):
        result = call(*words, *own)
        assert result.exit_code == 0, result.stderr
        assert any(name in result.stdout for name in ("own-avg", "own-net", "own-blobs"))
    result = call("run", "own-avg", *own, "model.name=own-net", "model.width=3", "hyper.factor=0.5")
    assert result.exit_code == 0, result.stderr
    ((experiment, _),) = started
    assert (experiment.imports, experiment.hyper.factor) == ((str(tmp_path / "mine.py"),), 0.5)
    assert experiment.model.settings.width == 3
    wrong = call("run", "fedavg", *own, "--import", "other.py")
    assert (wrong.exit_code, wrong.stderr) == (
        2,
        f"sartor: {tmp_path / 'other.py'}, line 1: ZeroDivisionError: division by zero\n",
    )
