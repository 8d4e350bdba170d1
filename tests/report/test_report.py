"""Reports: the numbers are those of the runs, both renderers draw them, and no text becomes markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from report_runs import NAMES, everything, rewrite, store_run
from typer.testing import CliRunner

import sartor
from sartor.commands.main import app
from sartor.data.clients import from_clients
from sartor.errors import SartorError
from sartor.report import write_report
from sartor.report.figures import (
    Boxes,
    Dots,
    Figure,
    Grid,
    Lines,
    Spans,
    View,
    curves,
    distribution,
    evenly,
    figures,
    partitions,
)
from sartor.report.html import element, page
from sartor.report.images import write_figures
from sartor.report.interactive import spec
from sartor.report.runs import OWN, Material, mean_and_deviation, read
from sartor.report.style import BASE, SERIES, dash, marker
from sartor.report.tables import comparison, statistics
from sartor.runs.record import RunFolder
from sartor.studies.comparison import compare


def view(figure: Figure | None, *key: str) -> View:
    assert figure is not None
    return figure.views[key]


def lines(figure: Figure | None, *key: str) -> dict[str, Any]:
    panel = view(figure, *key).panel
    assert isinstance(panel, Lines)
    return {line.label: line for line in panel.lines}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return read(everything(tmp_path_factory.mktemp("runs")))


# -- reading ---------------------------------------------------------------------------------------------


def test_runs_that_differ_in_the_seed_alone_are_one_method(tmp_path: Path) -> None:
    for seed in (1, 0):
        store_run(tmp_path / f"s{seed}", "fedprox", seed, engine={"name": "stacked" if seed else "loop"})
    store_run(tmp_path / "other", "fedprox", 0, hyper={"mu": 0.5})
    groups = read([tmp_path]).groups
    assert [[run.seed for run in group.runs] for group in groups] == [[0], [0, 1]]
    assert groups[0].label == "fedprox hyper.mu=0.5"
    assert re.fullmatch(r"fedprox hyper\.mu=[\d.]+", groups[1].label)


def test_a_run_given_or_stored_twice_counts_once(tmp_path: Path) -> None:
    first, again = store_run(tmp_path / "a"), store_run(tmp_path / "b")
    read_once = read([first, first])
    assert len(read_once.runs) == 1
    assert not read_once.notes
    both = read([first, again])
    assert [run.path for run in both.runs] == [again]
    assert str(first) in both.notes[0]


def test_runs_that_do_not_compare_are_told(tmp_path: Path) -> None:
    names = ("a", "b")
    runs = [store_run(tmp_path / "a"), store_run(tmp_path / "b", "separate", names=names)]
    assert any("same partition" in note for note in read(runs).notes)
    assert not read([runs[0]]).notes


def test_an_unfinished_run_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    done = store_run(tmp_path / "a", seed=0, accuracies=(0.1, 0.2, 0.3))
    half = store_run(tmp_path / "b", seed=1, accuracies=(0.4, 0.5), finished=False, rounds=3)
    material = read([done, half])
    assert [len(group.runs) for group in material.groups] == [1, 1]  # it must not cut the others short
    assert "unfinished, round 2" in material.groups[1].label
    assert lines(curves(material, "accuracy"), "shared_local", "round")["fedavg"].y == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "missing", "no such run folder"),
        (lambda folder: folder, "not a run folder"),
        (lambda folder: (folder / "file").write_text("") or folder / "file", "is a file"),
        (lambda folder: store_run(folder / "run", accuracies=()), "no evaluation is recorded yet"),
    ],
)
def test_what_is_no_run_is_one_message(tmp_path: Path, make: Any, words: str) -> None:
    with pytest.raises(SartorError, match=words):
        write_report(make(tmp_path), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_run_that_failed_before_it_was_evaluated_says_how(tmp_path: Path) -> None:
    run = store_run(tmp_path / "run", accuracies=(), finished=False)
    RunFolder.open(run).write_diverged("fedavg, round 1: not finite", "hash of the data")
    with pytest.raises(SartorError, match="run: failed before it was evaluated: fedavg, round 1: not finite"):
        read([run])


def test_of_a_measure_of_ones_own_more_may_be_better(tmp_path: Path) -> None:
    """Its direction is the runs': the best was called the worst, and the worst was bold."""
    runs = []
    for place in range(10):
        accuracies, hyper = (place / 20, place / 10), {"lr": place + 1.0}
        run = store_run(tmp_path / f"run {place}", accuracies=accuracies, finished=False, hyper=hyper)
        rewrite(run, '"accuracy', '"hits')
        told = {"headline": "hits", "more_is_better": True}
        RunFolder.open(run).write_summary({"data": "own", "partition_hash": "h", "last": {}, **told})
        runs.append(run)
    read_back = read(runs)
    assert read_back.headline == "hits"
    table = comparison(read_back)
    assert [row[0].text.split("=")[1] for row in table.rows][:2] == ["10.0", "9.0"]
    assert [place for place, row in enumerate(table.rows) if row[2].best] == [0]
    shown = view(curves(read_back, "hits"), "shared_local", "round")
    assert "hyper.lr=10.0 has the highest hits, 0.9" in shown.sentence
    assert isinstance(shown.panel, Lines)
    assert shown.panel.lines[-5].label.endswith("lr=10.0")  # the first of those that are in colour
    assert shown.table[1][2] == shown.table[1][1]


def test_a_run_that_goes_on_is_shown_by_its_own_score(tmp_path: Path) -> None:
    """What it is judged by, and of which data it is, stands in its settings; and how it failed beside it."""
    settings = {"data": {"path": "hospitals.csv"}, "evaluate": {"headline": "macro_f1"}}
    going = store_run(tmp_path / "going", finished=False, **settings)
    RunFolder.open(going).write_diverged("fedavg, round 3: not finite", "hash of the data")
    shown = read([going])
    assert shown.headline == "macro_f1"
    assert shown.runs[0].data == "hospitals"
    (note,) = shown.notes
    assert note.endswith("shown as far as it has come, it failed: fedavg, round 3: not finite.")


def test_a_run_with_nothing_to_show_is_left_out_and_named(tmp_path: Path) -> None:
    store_run(tmp_path / "done")
    store_run(tmp_path / "begun", accuracies=(), finished=False)
    failed = store_run(tmp_path / "failed", accuracies=(), finished=False)
    RunFolder.open(failed).write_diverged("fedavg, round 1: not finite", "hash of the data")
    shown = read([tmp_path])
    assert [run.path.name for run in shown.runs] == ["done"]
    assert [note.split(", ")[0] for note in shown.notes] == ["Left out", "Left out"]
    assert "begun: no evaluation is recorded yet" in shown.notes[0]
    assert "failed: failed before it was evaluated: fedavg, round 1: not finite" in shown.notes[1]


def test_methods_of_several_comparisons_are_told_apart(tmp_path: Path) -> None:
    """Two of one name stood in all tables, each with the worst clients of the second."""
    folders = []
    for alpha in (0.1, 10.0):
        settings = {"partition": {"alpha": alpha}, "model": {"name": "softmax"}}
        methods = {"fedavg": {}, "strong": {"algorithm": "fedprox", "mu": 1.0}}
        out = tmp_path / str(alpha)
        compare(methods, experiment=settings, clients=6, rounds=1, seeds=1, references=False, out=out)
        folders.append(out)
    both = read(folders)
    names = [f"fedavg partition.alpha={alpha}" for alpha in (0.1, 10.0)]
    others = [f"strong: fedprox partition.alpha={alpha}" for alpha in (0.1, 10.0)]
    assert [group.label for group in both.groups] == [names[0], others[0], names[1], others[1]]
    assert [group.label for group in read(folders[:1]).groups] == ["fedavg", "strong"]
    rows = view(distribution(both), "shared_local", "accuracy").table
    for group, row in zip(both.groups, rows[1:], strict=True):
        worst = group.runs[0].last["shared_local"]["accuracy_spread"]["worst_decile"]
        assert (row[0], row[-1]) == (group.label, f"{100 * worst:.1f} %")


def test_damage_is_one_message(tmp_path: Path) -> None:
    run = store_run(tmp_path / "run")
    (tmp_path / "comparison.json").write_text('{"methods": [{}]}')
    with pytest.raises(SartorError, match=r"comparison.json: damaged"):
        read([tmp_path])
    (run / "partition.npz").write_bytes(b"PK")
    with pytest.raises(SartorError, match=r"partition.npz"):
        read([run])


# -- numbers ---------------------------------------------------------------------------------------------


def test_curves_are_means_over_seeds_with_their_deviation(material: Material) -> None:
    line = lines(curves(material, "accuracy"), "shared_local", "round")["fedavg"]
    assert line.x == [1, 2]
    assert line.y == pytest.approx([0.3, 0.7])
    wide = np.std([0.2, 0.4], ddof=1)
    assert line.low == pytest.approx([0.3 - wide, 0.7 - wide])
    assert line.high == pytest.approx([0.3 + wide, 0.7 + wide])
    assert lines(curves(material, "loss"), "shared_local", "round")["fedavg"].y == pytest.approx([0.7, 0.3])


def test_curves_go_by_round_by_virtual_time_and_by_bytes_of_both_ways(material: Material) -> None:
    figure = curves(material, "accuracy")
    assert lines(figure, "shared_local", "bytes")["separate"].x == [1500, 3000]
    by_time = lines(figure, "shared_local", "time")
    assert list(by_time) == ["separate"]  # the others have no clock
    assert by_time["separate"].x == [1.5, 4.0]


def test_without_a_clock_there_is_no_virtual_time(tmp_path: Path) -> None:
    figure = curves(read([store_run(tmp_path / "a")]), "accuracy")
    assert figure is not None
    assert list(figure.choices[1].options) == ["round", "bytes"]


def test_own_is_the_personal_model_or_else_the_shared_one(tmp_path: Path) -> None:
    run = store_run(tmp_path / "a", "fedupdate", personal=True)
    rewrite(run, '"personal_local": {"accuracy": 0.5', '"personal_local": {"accuracy": 0.75')
    material = read([run, store_run(tmp_path / "b", "fedavg")])
    found = lines(curves(material, "accuracy"), OWN, "round")
    assert found["fedupdate"].y == [0.25, 0.75]
    assert found["fedavg"].y == [0.25, 0.5]
    figure = curves(material, "accuracy")
    assert figure is not None
    assert figure.first == (OWN, "round")


def test_a_loss_that_was_not_finite_is_a_gap(tmp_path: Path) -> None:
    run = store_run(tmp_path / "a", accuracies=(0.25, 0.5, 0.75))
    rewrite(run, '"loss": 0.5', '"loss": null')
    figure = curves(read([run]), "loss")
    assert lines(figure, "shared_local", "round")["fedavg"].y == [0.75, None, 0.25]
    assert json.loads(json.dumps(spec(view(figure, "shared_local", "round"))))["data"][0]["y"][1] is None


def test_the_distribution_has_every_client_of_every_seed(material: Material) -> None:
    panel = view(distribution(material), "shared_local", "accuracy").panel
    assert isinstance(panel, Boxes)
    box = next(box for box in panel.boxes if box.label == "fedavg")
    every = sorted(accuracy * (place + 1) / 4 for accuracy in (0.6, 0.8) for place in range(4))
    assert box.values == pytest.approx(every)
    assert box.five == pytest.approx(tuple(np.percentile(every, (0, 25, 50, 75, 100))))
    assert box.mean == pytest.approx(np.mean(every))


def test_the_dots_of_the_partition_are_all_its_training_samples(material: Material) -> None:
    run = material.runs[0]
    assert run.partition is not None
    panel = view(partitions(material), run.partition.hash).panel
    assert isinstance(panel, Dots)
    counts = np.zeros((len(panel.x_names), len(panel.y_names)), int)
    counts[panel.x, panel.y] = panel.size
    assert np.array_equal(counts, run.partition.counts("train"))
    assert panel.x_names == list(NAMES)


def test_groups_stand_at_their_client_and_round_and_absent_clients_nowhere(material: Material) -> None:
    figure = next(figure for figure in figures(material) if figure.name == "groups")
    (chosen,) = figure.views.values()
    assert isinstance(chosen.panel, Grid)
    assert chosen.panel.values == [[0, 1], [0, None], [1, 1], [1, 0]]
    assert "number of groups: 2; clients changed their group 2 times" in chosen.sentence


def test_a_heat_map_is_the_matrix_that_was_recorded(material: Material) -> None:
    found = {figure.name: figure for figure in figures(material)}
    similar = found["similarity"]
    assert list(similar.choices[1].options) == ["conv1", "output"]
    key = similar.first
    assert key[2] == "2"  # the last round
    panel = similar.views[key].panel
    assert isinstance(panel, Grid)
    assert panel.values[0] == [0.0, 0.25, 0.5, 1.0]
    signed = found["coefficients"].views[found["coefficients"].first]
    assert "4 pairs attract, 2 repel, 6 neither" in signed.sentence
    drawn = spec(signed)["data"][0]
    assert drawn["zmin"] == -drawn["zmax"] == -0.5  # zero has the middle colour


def test_arrivals_are_bars_from_start_to_finish(material: Material) -> None:
    figure = next(figure for figure in figures(material) if figure.name == "arrivals")
    (chosen,) = figure.views.values()
    panel = chosen.panel
    assert isinstance(panel, Spans)
    bars = {
        panel.names[row]: (start, finish)
        for row, start, finish in zip(panel.row, panel.start, panel.finish, strict=True)
    }
    assert bars == {"north": (0.0, 1.0), "south": (0.5, 4.0), NAMES[2]: (0.25, 1.5)}
    drawn = spec(chosen)["data"][0]
    ends = [base + long for base, long in zip(drawn["base"], drawn["x"], strict=True)]
    assert sorted(ends) == [1.0, 1.5, 4.0]


def test_figures_without_data_are_left_out(tmp_path: Path) -> None:
    run = store_run(tmp_path / "a", partition=False)
    assert [figure.name for figure in figures(read([run]))] == ["accuracy", "loss", "clients"]


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        ("diversifed", "coefficients"),
        ("ma-fsvrg", "groups"),
        ("fedasync", "arrivals"),
        ("cfl", "groups"),
        ("spfl", "similarity"),
    ],
)
def test_what_a_method_records_is_drawn(algorithm: str, name: str, tmp_path: Path) -> None:
    sartor.run(
        algorithm, data="digits", clients=4, rounds=2, model="softmax", engine="loop", out=tmp_path / "run"
    )
    found = {figure.name: figure for figure in figures(read([tmp_path / "run"]))}
    assert {"accuracy", "loss", "clients", "partition", name} <= set(found)


def test_without_classes_there_is_the_loss_alone(tmp_path: Path) -> None:
    data = from_clients({name: (torch.randn(20, 3), torch.randn(20, 1)) for name in "abc"}, targets="number")
    task = sartor.Task(torch.nn.Linear(3, 1), loss=lambda outputs, y: ((outputs - y) ** 2).mean(1))
    sartor.run("fedavg", data=data, model=task, rounds=2, engine="loop", out=tmp_path / "run")
    material = read([tmp_path / "run"])
    assert [figure.name for figure in figures(material)] == ["loss", "clients"]
    table = comparison(material)
    assert table.heads == ["method", "seeds", "loss, own test data", "MB sent", "seconds of training"]
    assert "Accurac" not in table.about
    assert "Loss while learning" in page(material, figures(material))


def test_thinning_keeps_the_ends() -> None:
    places = evenly(1001, 300)
    assert (places[0], places[-1], len(places)) == (0, 1000, 300)
    assert len(set(places)) == 300
    assert max(np.diff(places)) <= 4


def test_long_runs_are_drawn_from_fewer_points(tmp_path: Path) -> None:
    accuracies = np.linspace(0, 1, 400).tolist()
    material = read([store_run(tmp_path / "a", accuracies=accuracies, names="ab", partition=False)])
    line = lines(curves(material, "accuracy"), "shared_local", "round")["fedavg"]
    assert len(line.x) == 300
    assert (line.x[0], line.x[-1]) == (1, 400)
    assert (line.y[0], line.y[-1]) == (0, 1)


def test_heat_maps_of_many_clients_leave_rounds_out(tmp_path: Path) -> None:
    rows = [{"observed": {"similarity_all": np.zeros((200, 200)).tolist()}} for _ in range(13)]
    run = store_run(tmp_path / "a", accuracies=[0.5] * 13, names="ab", rows=rows, partition=False)
    figure = next(figure for figure in figures(read([run])) if figure.name == "similarity")
    steps = list(figure.choices[2].options)
    assert len(steps) == 10
    assert (steps[0], steps[-1]) == ("1", "13")
    assert "10 of 13 rounds" in figure.about


# -- tables ----------------------------------------------------------------------------------------------


def test_the_comparison_is_mean_and_sample_deviation_over_seeds(material: Material) -> None:
    table = comparison(material)
    row = next(row for row in table.rows if row[0].text == "fedavg")
    found = dict(zip(table.heads, row, strict=True))
    assert found["seeds"].text == "2"
    assert found["shared model, own test data"].text == "70.0 ± 14.1"
    assert found["shared model, own test data"].value == pytest.approx(0.7)
    assert found["worst decile"].text == "35.0 ± 7.1"
    assert found["personal models, own test data"].text == "–"
    assert found["personal models, own test data"].value is None


def test_one_seed_has_no_deviation() -> None:
    assert mean_and_deviation([0.5]) == (0.5, None)
    assert mean_and_deviation([None]) == (None, None)


@pytest.mark.slow
def test_a_comparison_is_shown_with_its_statistics(tmp_path: Path) -> None:
    made = compare(
        ["fedavg"],
        data="digits",
        clients=4,
        rounds=2,
        seeds=2,
        model="softmax",
        target=0.01,
        out=tmp_path / "c",
    )
    store_run(tmp_path / "c" / "stranger")  # lies beside them, but is not part of it
    material = read([tmp_path / "c"])
    assert {group.label for group in material.groups} == {method.label for method in made.methods}
    stored = material.comparisons[0]
    pairs, ranks, target = statistics(stored)
    for pair, row in zip(made.pairs, pairs.rows, strict=True):
        assert [entry.text for entry in row[:2]] == [pair.first, pair.second]
        assert row[2].text == f"{pair.better} / {pair.equal} / {pair.worse}"
        assert row[3].value == pytest.approx(pair.mean_difference)
        assert row[-1].value == pytest.approx(pair.p_holm)
    assert made.ranking is not None
    assert [row[0].text for row in ranks.rows] == list(made.ranking.methods)
    assert {row[1].text for row in target.rows} == {"2 of 2"}
    text = page(material, figures(material))
    assert "Paired differences" in text
    # The same numbers by both ways.
    table = comparison(material)
    by_label = {row[0].text: dict(zip(table.heads, row, strict=True)) for row in table.rows}
    for method in made.methods:
        if "shared_local" in method.cells:
            shown = by_label[method.label]["shared model, own test data"].value
            assert shown == pytest.approx(method.cells["shared_local"].mean)


# -- renderers -------------------------------------------------------------------------------------------


def test_plotly_knows_every_property_that_is_used(material: Material) -> None:
    import plotly.graph_objects as graph

    def inked(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: inked(part) for key, part in value.items()}
        if isinstance(value, list):
            return [inked(part) for part in value]
        return "#123456" if isinstance(value, str) and value.startswith("@") else value

    for figure in figures(material):
        for chosen in figure.views.values():
            made = inked(spec(chosen))
            graph.Figure({"data": made["data"], "layout": made["layout"]})  # refuses what it does not know


def test_every_view_says_in_words_what_it_shows(material: Material) -> None:
    for figure in figures(material):
        for key, chosen in figure.views.items():
            assert re.search(r"\d", chosen.sentence), (figure.name, key)
            assert chosen.sentence.endswith(".")
            assert all(len(row) == len(chosen.table[0]) for row in chosen.table)


def test_figures_are_written_for_paper(material: Material, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    every = figures(material)
    shortened = [replace(figure, views={figure.first: figure.views[figure.first]}) for figure in every]
    written = write_figures(shortened, tmp_path / "figures", "png")
    assert len(set(written)) == len(every) == 9
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", path.name) for path in written)


def test_every_view_has_a_file_but_of_steps_the_last_only(material: Material) -> None:
    found = {figure.name: figure for figure in figures(material)}
    assert found["accuracy"].printed() == found["accuracy"].views
    assert {key[1:] for key in found["similarity"].printed()} == {("conv1", "2"), ("output", "2")}


def test_printed_lines_are_the_lines_of_the_page(material: Material) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure as Canvas

    from sartor.report.images import draw

    chosen = view(curves(material, "accuracy"), "shared_local", "round")
    canvas = Canvas()
    axes = canvas.add_subplot()
    draw(chosen.panel, canvas, axes)
    traces = {trace["name"]: trace for trace in spec(chosen)["data"] if "name" in trace}
    assert len(axes.lines) == len(traces)
    for line in axes.lines:
        assert list(line.get_ydata()) == pytest.approx(traces[line.get_label()]["y"], rel=1e-4)


def test_without_matplotlib_the_message_says_what_to_install(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import builtins

    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(SartorError, match=r"pip install 'sartor\[plot\]'"):
        write_figures(figures(material), tmp_path)


# -- style -----------------------------------------------------------------------------------------------


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of the web content accessibility guidelines."""
    bright = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (bright[1] + 0.05) / (bright[0] + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_read_on_their_background(theme: str) -> None:
    base = BASE[theme]
    for background in (base["background"], base["panel"]):
        for text in ("text", "quiet", "link"):
            assert contrast(base[text], background) >= 4.5
    for colour in SERIES[theme]:
        assert contrast(colour, base["background"]) >= 3, colour


# Machado, Oliveira and Fernandes 2009, severity 1, in linear RGB
PROTANOPIA = [
    [0.152286, 1.052583, -0.204868],
    [0.114503, 0.786281, 0.099216],
    [-0.003882, -0.048116, 1.051998],
]
DEUTERANOPIA = [
    [0.367322, 0.860646, -0.227968],
    [0.280085, 0.672501, 0.047413],
    [-0.011820, 0.042940, 0.968881],
]


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.maximum(to_xyz @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089], 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("blindness", [np.eye(3), PROTANOPIA, DEUTERANOPIA], ids=["none", "protan", "deutan"])
def test_colours_stay_apart_for_the_colour_blind(theme: str, blindness: Any) -> None:
    seen = {colour: lab(np.asarray(blindness) @ linear(colour)) for colour in SERIES[theme]}
    for one, other in combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 15, (one, other)


def test_neighbours_differ_in_dash_and_marker_too() -> None:
    for place in range(40):
        assert dash(place) != dash(place + 1)
        assert marker(place) != marker(place + 1)
    looks = {(place % 8, dash(place), marker(place)) for place in range(56)}
    assert len(looks) == 56


# -- the page --------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Tags, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    evil = '</script><script>hurt()</script><img src=x onerror="hurt()">'
    rows = [{"observed": {f"similarity_{evil}": [[1.0]], evil: 0.5}}] * 2
    run = store_run(tmp_path / "a", names=[evil, "b"], rows=rows)
    config = (run / "config.toml").read_text().replace('"digits"', json.dumps(evil))
    (run / "config.toml").write_text(config)
    summary = json.loads((run / "summary.json").read_text())
    RunFolder.open(run).write_summary({**summary, "data": evil})
    material = read([run])
    reader = Reader(page(material, figures(material)))
    assert [tag for tag, _ in reader.tags].count("script") == 3  # the data, plotly and our own
    assert "img" not in [tag for tag, _ in reader.tags]
    assert not any(name.startswith("on") for _, attributes in reader.tags for name in attributes)
    assert evil in "".join(reader.texts)  # it is shown as it is
    data = next(text for text in reader.texts if text.startswith('{"accuracy"'))
    assert json.loads(data)["partition"]["0"]["data"][0]["text"][0].startswith("client &lt;/script")


def test_elements_escape_what_is_not_markup() -> None:
    inner = element("b", "<i>")
    assert element("p", inner, "<i>", title='"<') == '<p title="&quot;&lt;"><b>&lt;i&gt;</b>&lt;i&gt;</p>'
    assert element("input", disabled=True, hidden=False, data_value=None) == "<input disabled>"


def test_the_page_asks_nothing_of_the_network_and_runs_its_own_scripts_only(material: Material) -> None:
    reader = Reader(page(material, figures(material)))
    for tag, attributes in reader.tags:
        assert "src" not in attributes
        assert tag not in ("link", "iframe", "object", "base")
        assert not (attributes.get("href") or "#").startswith("http")
    policies = [
        attributes["content"] or ""
        for tag, attributes in reader.tags
        if tag == "meta" and "http-equiv" in attributes
    ]
    assert policies[0].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policies[0].split("script-src")[1].split(";")[0]


def test_the_page_has_a_language_a_title_and_names_for_everything(material: Material) -> None:
    reader = Reader(page(material, figures(material)))
    tags = reader.tags
    assert ("html", {"lang": "en-GB"}) in tags
    assert [tag for tag, _ in tags].count("h1") == 1
    identifiers = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    for tag, attributes in tags:
        for key in ("aria-labelledby",):
            assert attributes.get(key) is None or attributes[key] in identifiers
        if tag == "a":
            assert (attributes["href"] or "")[1:] in identifiers
        if attributes.get("role") == "img":
            assert attributes["aria-label"]
    drawn = [attributes for tag, attributes in tags if tag == "figure"]
    assert len(drawn) == len(figures(material)) == 9
    assert [tag for tag, _ in tags].count("figcaption") == 9


def test_every_setting_and_the_hash_are_on_the_page(material: Material) -> None:
    texts = set(Reader(page(material, figures(material))).texts)
    run = material.runs[0]
    assert run.hash in texts
    assert {"hyper.lr", "data.clients", "torch", "started"} <= texts
    assert RunFolder.open(run.path).environment["started"] in texts


# -- the command -----------------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store_run(tmp_path / "runs" / "a", partition=False)
    words = ["report", "runs", "--out", "deep/page.html", "--figures", "figures", "--format", "pdf"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "deep/page.html" in done.output
    assert (tmp_path / "deep" / "page.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "figures" / "accuracy-shared_local-round.pdf").read_bytes().startswith(b"%PDF")
    assert not list((tmp_path / "deep").glob(".*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing"], "no such run folder"),
        (["run", "--out", "run"], "is a folder"),
        (["run", "--out", "file/report.html"], "cannot be written"),
        (["run", "--figures", "file/figures"], "cannot be written"),
        (["run", "--format", "gif"], "gif"),
    ],
)
def test_mistakes_end_in_one_message(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store_run(tmp_path / "run", partition=False)
    Path("file").write_text("")
    done = CliRunner().invoke(app, ["report", *words])
    assert done.exit_code == 2
    assert message in done.output
    assert not isinstance(done.exception, (OSError, SartorError))
