"""Code of users' own: imported by name, known by its hash, and found again."""

from __future__ import annotations

import hashlib
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_processes import Nursery

import sartor
from owned import ALGORITHM, DATA, MODEL, forgetful
from sartor import extensions
from sartor.algorithms import registered
from sartor.data.sources import SOURCES
from sartor.errors import SartorError, SettingError
from sartor.extensions import (
    Registry,
    call,
    find_function,
    import_again,
    import_code,
    imported,
    read_code,
)
from sartor.model.networks import MODELS
from sartor.runs.experiment import fingerprint, from_mapping, load
from sartor.runs.record import RunFolder

__all__ = ["forgetful"]

SMALL: dict[str, Any] = {"clients": 3, "rounds": 2, "engine": "loop", "local": {"batch": 16}}


@pytest.fixture(autouse=True)
def _own(forgetful: None) -> None:
    """Every test begins with nothing imported."""


def counting(path: Path) -> None:
    """A file that notes in another one that it is executed."""
    path.write_text(f"with open({str(path) + '.log'!r}, 'a') as log: log.write('x')\n")


def times(path: Path) -> int:
    log = Path(f"{path}.log")
    return len(log.read_text()) if log.exists() else 0


# Importing -------------------------------------------------------------------------------------------------


def test_a_file_is_executed_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    counting(path)
    first = import_code(str(path))
    assert first.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (import_code(str(path)), imported("mine.py"), times(path)) == (first, first, 1)
    path.write_text(path.read_text() + "value = 3\n")
    assert import_code(str(path)) != first
    assert times(path) == 2
    assert sys.modules["imported.mine"].value == 3


def test_a_copy_elsewhere_is_the_same_and_another_file_of_that_name_is_refused(tmp_path: Path) -> None:
    for folder in "abc":
        (tmp_path / folder).mkdir()
    counting(tmp_path / "a" / "mine.py")
    (tmp_path / "b" / "mine.py").write_bytes((tmp_path / "a" / "mine.py").read_bytes())
    (tmp_path / "c" / "mine.py").write_text("value = 1\n")
    for folder in "ab":
        import_code(str(tmp_path / folder / "mine.py"))
    assert times(tmp_path / "a" / "mine.py") == 1
    with pytest.raises(SettingError, match=r"c.mine\.py: .*b.mine\.py is imported already; give one of them"):
        import_code(str(tmp_path / "c" / "mine.py"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef f(:\n", "mine.py, line 2: SyntaxError: "),
        (
            "import math\n\nmath.sqroot(2)\n",
            "mine.py, line 3: AttributeError: module 'math' has no attribute",
        ),
        ("def f():\n    return 1 / 0\n\nf()\n", "mine.py, line 2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit('enough')\n", "mine.py, line 2: SystemExit: enough"),
        (ALGORITHM.replace('"own-avg"', '"fedavg"'), "algorithm 'fedavg' is registered already, by sartor."),
        (MODEL.replace("@dataclass(frozen=True)\n", ""), "model 'own-net': expected a dataclass of settings"),
    ],
)
def test_an_error_in_a_file_names_its_line(
    tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    monkeypatch.delitem(sys.modules, "imported.mine", raising=False)  # another test's
    with pytest.raises(SartorError) as told:
        import_code(str(path))
    assert message in str(told.value)
    assert str(told.value).startswith(f"{path}, line ")
    assert "imported.mine" not in sys.modules
    assert imported("mine.py") is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere/mine.py", "nowhere/mine.py: no such file to import"),
        ("mine", "mine: no such installed module; a file to import is named with its ending"),
        ("my module", "no such installed module"),
        ("folder/mine", "expected a Python file"),
        ("sp ace.py", "expected a Python file"),
    ],
)
def test_what_cannot_be_imported_is_said(source: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        import_code(source)


def test_nothing_is_executed_whose_hash_is_another(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    counting(path)
    code = read_code(str(path))
    assert times(path) == 0
    path.write_text(path.read_text() + "# another\n")
    with pytest.raises(SartorError, match="has changed"):
        import_code(str(path), code.sha256)
    with pytest.raises(SartorError, match=r"a run: was made with another mine\.py .*`sartor run` it anew"):
        import_again(code, "a run")
    path.unlink()
    with pytest.raises(
        SartorError, match=r"no such file.*put it back, or say where .*--import PATH/mine\.py"
    ):
        import_again(code, "a run")
    assert times(path) == 0


def test_an_installed_module_is_known_by_all_files_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "our_package"
    package.mkdir()
    counting(package / "__init__.py")
    (package / "methods.py").write_text("from our_package.others import value\n")
    (package / "others.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = read_code("our_package.methods")
    assert times(package / "__init__.py") == 0
    assert import_code("our_package.methods") == before
    assert times(package / "__init__.py") == 1
    (package / "others.py").write_text("value = 2\n")
    assert read_code("our_package.methods").sha256 != before.sha256
    for name in [name for name in sys.modules if name.startswith("our_package")]:
        del sys.modules[name]


def test_functions_are_found_in_what_was_imported_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text("def build(classes, extra=2):\n    return classes * extra\n\nvalue = 3\n")
    with pytest.raises(
        SettingError, match=r"model\.path = .*net\.py is not imported here; give it by --import"
    ):
        find_function(f"{path}:build", "model.path")
    import_code(str(path))
    assert call(find_function("elsewhere/net.py:build", "model.path"), "x", shape=(1,), classes=4) == 8
    with pytest.raises(SettingError, match=r"net\.py has no function value"):
        find_function("net.py:value", "model.path")


def test_what_a_function_asks_for_and_how_it_fails_is_told(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text("def build(depth):\n    return depth\n\n\ndef load():\n    return {}['a']\n")
    import_code(str(path))
    with pytest.raises(SettingError, match="asks for 'depth'; a function here may have shape, classes"):
        call(find_function("net.py:build", "model.path"), "model.path", shape=1, classes=2)
    with pytest.raises(SartorError, match=r"data\.path: .*net\.py, line 6: KeyError: 'a'"):
        call(find_function("net.py:load", "data.path"), "data.path", seed=0)


# Installed packages ----------------------------------------------------------------------------------------


def installed(folder: Path, name: str, group: str, text: str) -> None:
    """A package with an entry point of a group."""
    (folder / f"{name}.py").write_text(text)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}\n")


def test_packages_are_imported_when_a_name_is_not_known_or_names_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    colours: Registry[int] = Registry("sartor.test_colours", "colour", {"red": 1})
    monkeypatch.setattr(extensions, "COLOURS", colours, raising=False)
    good = "from sartor import extensions\nextensions.COLOURS.add('blue', 2)\n"
    installed(tmp_path, "broken_colours", colours.group, "import no_such_module_here\n")
    installed(tmp_path, "good_colours", colours.group, good)
    monkeypatch.syspath_prepend(tmp_path)
    assert (colours["red"], "red" in colours) == (1, True)
    assert "good_colours" not in sys.modules
    with caplog.at_level(logging.WARNING):
        assert colours["blue"] == 2
        assert list(colours) == ["blue", "red"]
        assert "green" not in colours
    (told,) = caplog.messages
    assert told.startswith("package broken_colours is left out, as its colour")
    assert "no_such_module_here" in told
    del sys.modules["good_colours"]


def test_a_method_of_an_installed_package_has_its_name_on_the_command_line(tmp_path: Path) -> None:
    installed(tmp_path, "their_methods", "sartor.algorithms", ALGORITHM)
    installed(tmp_path, "their_broken_models", "sartor.models", "raise RuntimeError('not today')\n")
    nursery, path = Nursery(tmp_path), {"PYTHONPATH": str(tmp_path)}
    done = nursery.start("run", "own-avg", "rounds=1", "data.clients=2", "hyper.factor=0.5", env=path)
    wrong = nursery.start("run", "own-avg", "model.name=mpl", env=path)
    codes = [done.wait(), wrong.wait()]
    nursery.close()
    assert codes == [0, 2], done.output
    assert "own-avg on digits" in done.output
    assert "their_broken_models" not in done.output  # nobody has asked for a model that is not known
    told = [line for line in wrong.output.splitlines() if "their_broken_models" in line]
    assert len(told) == 1
    assert "RuntimeError: not today" in told[0]
    assert "model.name = 'mpl': unknown name; did you mean mlp?" in wrong.output
    assert "Traceback" not in wrong.output


# Runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with an algorithm, a model and a data set of a user's own, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ALGORITHM + MODEL + DATA)
    return tmp_path / "mine.py"


def test_what_a_file_registers_is_run_by_name(mine: Path) -> None:
    result = sartor.run(
        "own-avg", imports="mine.py", data="own-blobs", model="own-net", hyper={"factor": 0.5}, **SMALL
    )
    assert (result.summary["algorithm"], result.summary["data"]) == ("own-avg", "own-blobs")
    assert (result.summary["model"], result.summary["clients"]) == ("own-net", 3)
    folder = RunFolder.open(result.folder or "")
    (code,) = folder.imports
    assert (code.source, code.sha256) == (str(mine), hashlib.sha256(mine.read_bytes()).hexdigest())
    assert folder.experiment.imports == (str(mine),)
    # The factor is the method's own, so its code has run.
    halved = sartor.run("own-avg", data="own-blobs", model="own-net", hyper={"factor": 0.0}, **SMALL)
    assert result.w is not None
    assert halved.w is not None
    assert torch.equal(halved.w, halved.task.initial())
    assert not torch.equal(result.w, halved.w)


def test_functions_in_files_are_model_and_data(mine: Path) -> None:
    given = {"model": "mine.py:build", "data": "mine.py:load", "head": "1", "rounds": 1, "store": False}
    first, again = (sartor.run("fedavg", **given) for _ in range(2))
    other = sartor.run("fedavg", **given, seed=1)
    assert first.summary["model"] == "mine.py:build"
    assert first.summary["clients"] == 4
    assert first.task.part("head").size > 0
    assert first.w is not None and again.w is not None and other.w is not None  # noqa: PT018
    assert torch.equal(first.w, again.w)
    assert torch.equal(first.task.initial(), again.task.initial())
    assert not torch.equal(first.task.initial(), other.task.initial())  # drawn from the run's seed


def test_paths_in_a_file_are_relative_to_it(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = mine.parent / "experiment.toml"
    file.write_text('imports = ["mine.py"]\nalgorithm = "own-avg"\n[model]\npath = "mine.py:build"\n')
    elsewhere = mine.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    experiment = load(file)
    assert experiment.imports == (str(mine),)
    assert experiment.model.path == f"{mine}:build"
    with pytest.raises(SettingError, match=r"elsewhere.mine\.py: no such file to import"):
        load(None, ['imports=["mine.py"]'])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.path=mine.py:build", "model.name=mlp"], r"model\.name: the network is that of model\.path"),
        (["model.path=mine.py:build", "model.hidden=3"], r"model\.hidden: unknown key"),
        (["model.path=mine.py"], r"model\.path = 'mine\.py': expected a function in a file"),
        (["model.head=1"], r"model\.head: only for an own network"),
        (["imports=mine.py"], r"imports: expected a list, got 'mine\.py'"),
        (["data.path=mine.py:load", "data.label_column=y"], r"data\.label_column: only for a table"),
        (["data.path=missing.csv"], r"data\.path = 'missing\.csv': no such file or folder"),
        (["model.path=mine.py:own_data"], r"own_data.: asks for 'seed'; a function here may have shape, cl"),
        (["data.path=mine.py:build"], r"asks for 'shape'; a function here may have seed, clients, folder"),
    ],
)
def test_settings_that_do_not_fit_are_refused(mine: Path, settings: list[str], message: str) -> None:
    from sartor.runs.setup import set_up

    with pytest.raises(SartorError, match=message):
        set_up(load(None, settings))


def test_mapping_alone_imports_nothing(mine: Path) -> None:
    counting(mine)
    experiment = from_mapping({"imports": [str(mine)], "model": {"path": f"{mine}:build"}})
    assert times(mine) == 0
    with pytest.raises(SettingError, match="not imported"):
        sartor.runs.experiment.code_of(experiment)


def test_a_run_goes_on_with_the_same_code_wherever_it_lies(mine: Path) -> None:
    given = {"imports": "mine.py", "model": "mine.py:build", "data": "mine.py:load", "hyper": {"factor": 0.7}}
    whole = sartor.run("own-avg", **given, rounds=4, out="whole")
    sartor.run("own-avg", **given, rounds=2, out="half")
    for forgotten in ("moved", "changed"):
        extensions._IMPORTED.clear()
        registered().remove("own-avg")
        if forgotten == "moved":
            (mine.parent / "new").mkdir()
            mine.rename(mine.parent / "new" / "mine.py")
            with pytest.raises(SartorError, match=r"half: was made with mine\.py .*--import PATH/mine\.py"):
                sartor.resume("half", rounds=4)
            assert "own-avg" not in registered()
            result = sartor.resume("half", rounds=4, imports="new/mine.py")
            assert result.w is not None
            assert whole.w is not None
            assert torch.equal(result.w, whole.w)
        else:
            mine.write_text("open('executed', 'w')\n")
            with pytest.raises(SartorError, match=r"half: was made with another mine\.py"):
                sartor.resume("half", rounds=5)
            assert not Path("executed").exists()


def test_a_changed_file_makes_runs_anew_and_says_so(mine: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {**SMALL, "imports": "mine.py", "seeds": 1, "references": False, "out": "compared"}
    first = sartor.compare("own-avg,fedavg", **given)
    again = sartor.compare("own-avg,fedavg", **given)
    assert [run.reused for method in (*first.methods, *again.methods) for run in method.runs] == [
        False, False, True, True
    ]  # fmt: skip
    assert not caplog.messages
    mine.write_text(mine.read_text().replace("self.hyper.factor *", "0.0 *"))
    changed = sartor.compare("own-avg,fedavg", **given)
    assert [run.reused for method in changed.methods for run in method.runs] == [False, False]
    (told,) = caplog.messages
    assert told.startswith("mine.py: runs with it are made anew, as it has changed since")
    assert changed.method("own-avg").cells != first.method("own-avg").cells  # the new code has run
    assert changed.method("fedavg").cells == first.method("fedavg").cells


def test_own_names_are_listed_and_given_once(mine: Path) -> None:
    import_code(str(mine))
    assert "own-avg" in list(registered())
    assert "own-net" in list(MODELS)
    assert "own-blobs" in list(SOURCES)
    with pytest.raises(SartorError, match=r"data set 'digits' is registered already, by sartor\."):
        sartor.register_data("digits")(lambda: {})
    with pytest.raises(SartorError, match="a name has letters, digits"):
        sartor.register_data("a b")(lambda: {})


def test_an_application_brings_its_code_along(mine: Path, tmp_path: Path) -> None:
    from sartor.remote.flower_app import write_app

    words = ["model.path=mine.py:build", 'imports=["mine.py"]', "algorithm=own-avg"]
    experiment = load(None, words)
    write_app(tmp_path / "app", experiment)
    mine.unlink()
    extensions._IMPORTED.clear()
    registered().remove("own-avg")
    there = load(tmp_path / "app" / "experiment.toml")
    assert there.imports == (str(tmp_path / "app" / "mine.py"),)
    assert fingerprint(there) == fingerprint(experiment)
    (tmp_path / "server_app.py").write_text("value = 1\n")
    with pytest.raises(SettingError, match=r"has a server_app\.py of its own; rename yours"):
        write_app(tmp_path / "other", load(None, ['imports=["server_app.py"]']))


def test_newcomers_may_be_what_a_function_gives(mine: Path) -> None:
    from sartor.runs.newcomers import evaluate_run

    sartor.run("fedavg", model="mine.py:build", data="mine.py:load", rounds=1, out="run")
    Path("new.py").write_text("import mine_is_not_here\n")
    with pytest.raises(SartorError, match=r"new\.py, line 1: ModuleNotFoundError"):
        evaluate_run("run", data="new.py:load")
    Path("new.py").write_text(
        DATA.replace("own-blobs", "new-blobs").replace("own_data(0, 4)", "own_data(1, 7)")
    )
    found = evaluate_run("run", data="new.py:load")
    assert (found["clients"], found["newcomers"]) == (7, True)
