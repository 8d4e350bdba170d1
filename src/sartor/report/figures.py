"""The figures of a report as plain data, which :mod:`~sartor.report.interactive` and
:mod:`~sartor.report.images` draw alike.

A figure has choices (which model, by round or by bytes) and one view for each way to choose. Every view says
in words what it shows. A figure whose data no run has recorded is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from typing import Any, TypeAlias

import numpy as np

from sartor.report.runs import CELL_WORDS, OWN, Group, Material, Run, cell_of, cells_in, own_cell
from sartor.runs.metrics import is_share, spread

MOST_POINTS = 300
"""A line, a box or a bar chart with more points is drawn from so many of them, evenly chosen."""

MOST_SPANS = 2000
"""So many arrivals are drawn, the latest."""

MOST_NUMBERS = 400_000
"""Heat maps of one figure have about so many numbers in all; rounds between are left out to stay below."""

MOST_LINES, BRIGHT = 8, 5
"""Of more lines than these the best few are drawn in colour and the others in grey."""

MOST_TICKS = 24
LONGEST_TICK = 16

Number: TypeAlias = float | None


@dataclass(frozen=True)
class Line:
    """A line with a band around it; None is a gap."""

    label: str
    place: int
    x: list[Number]
    y: list[Number]
    low: list[Number] | None = None
    high: list[Number] | None = None
    quiet: bool = False
    """One of many that are only there to be seen behind the others: thin and grey, without a band."""
    hollow: bool = False
    """Marks alone with no line between them, such as a paper's numbers; all such lines have one label."""


@dataclass(frozen=True)
class Lines:
    """Lines over one axis."""

    x_label: str
    y_label: str
    lines: list[Line]
    percent: bool = False
    bytes: bool = False


@dataclass(frozen=True)
class Box:
    """The spread of some values: five numbers, the mean, and the values themselves, sorted."""

    label: str
    place: int
    values: list[float]
    five: tuple[float, float, float, float, float]
    mean: float

    @property
    def offsets(self) -> list[float]:
        """How far each dot stands beside the middle of its box.

        A fixed pattern, so that equal values can be told apart and no draw is random.
        """
        return [0.22 * ((7 * place) % 11 - 5) / 5 for place in range(len(self.values))]


@dataclass(frozen=True)
class Boxes:
    """Boxes side by side."""

    y_label: str
    boxes: list[Box]
    percent: bool = False


@dataclass(frozen=True)
class Dots:
    """Dots in a grid, with an area in proportion to their size."""

    x_label: str
    y_label: str
    x_names: list[str]
    y_names: list[str]
    x: list[int]
    y: list[int]
    size: list[int]
    size_label: str


@dataclass(frozen=True)
class Grid:
    """A heat map; ``kind`` is ``sequential``, ``diverging`` (zero in the middle) or ``groups`` (small whole
    numbers); None is an empty cell.
    """

    x_label: str
    y_label: str
    value_label: str
    x_names: list[str]
    y_names: list[str]
    values: list[list[Number]]
    kind: str


@dataclass(frozen=True)
class Spans:
    """Bars from a start to a finish, one row per name, coloured by a value."""

    x_label: str
    y_label: str
    value_label: str
    names: list[str]
    row: list[int]
    start: list[float]
    finish: list[float]
    value: list[float]
    words: list[str]


@dataclass(frozen=True)
class Ranks:
    """A critical-difference diagram: methods by average rank, and bars through those not told apart."""

    methods: list[str]
    """From the best to the worst."""
    ranks: list[float]
    cliques: list[list[int]]
    """Places of methods that cannot be told apart."""
    difference: float


Panel: TypeAlias = Lines | Boxes | Dots | Grid | Spans | Ranks


def tick_names(names: Sequence[str]) -> tuple[list[int], list[str]]:
    """The places on an axis that have room for a name, and the names, cut where they are long."""
    places = evenly(len(names), MOST_TICKS)
    chosen = [names[place] for place in places]
    return places, [name if len(name) <= LONGEST_TICK else name[: LONGEST_TICK - 1] + "…" for name in chosen]


@dataclass(frozen=True)
class View:
    """A panel, what it shows as a sentence, and its key numbers as a table (heads first)."""

    panel: Panel
    sentence: str
    table: list[list[str]] = field(default_factory=list)


Views: TypeAlias = dict[tuple[str, ...], View]


@dataclass(frozen=True)
class Choice:
    """Something a reader can choose: key -> words. Steps run along a slider, from the last one back."""

    name: str
    label: str
    options: dict[str, str]
    steps: bool = False


@dataclass(frozen=True)
class Figure:
    """A figure: its choices, and a view for every combination of their options that has data."""

    name: str
    title: str
    about: str
    choices: list[Choice]
    views: Views

    @property
    def first(self) -> tuple[str, ...]:
        """What is chosen when the page opens: the first options, and the last step."""
        wanted = [list(choice.options)[-1 if choice.steps else 0] for choice in self.choices]
        return tuple(wanted) if tuple(wanted) in self.views else next(iter(self.views))

    def printed(self) -> Views:
        """The views worth a file each: of steps only the last."""
        last = {place: list(choice.options)[-1] for place, choice in enumerate(self.choices) if choice.steps}
        chosen = {
            key: view
            for key, view in self.views.items()
            if all(key[place] == option for place, option in last.items())
        }
        return chosen or self.views


def figures(material: Material) -> list[Figure]:
    """Every figure that these runs have the data for."""
    makers: Sequence[Callable[[Material], Figure | None]] = (
        *(partial(curves, measure=measure) for measure in _measures(material)),
        ranks,
        distribution,
        partitions,
        memberships,
        similarities,
        coefficients,
        observations,
        arrivals,
    )
    return [figure for make in makers if (figure := make(material)) is not None]


def _measures(material: Material) -> list[str]:
    """What is plotted: the headline first."""
    return list(dict.fromkeys([material.headline, "accuracy", "loss"]))


# -- learning curves -------------------------------------------------------------------------------------

AXES = {"round": "round", "time": "virtual time", "bytes": "bytes sent", "epsilon": "ε spent"}
AXIS_LABELS = {**AXES, "bytes": "bytes sent, both ways, all clients"}


def curves(material: Material, measure: str) -> Figure | None:
    """A metric or the loss by what grows with the rounds: the mean over seeds with their deviation."""
    axes = {
        key: words
        for key, words in AXES.items()
        if any(row.get(key) is not None for run in material.runs for row in run.evaluated)
    }
    views: Views = {}
    more = material.more_is_better(measure)
    for cell, axis in product(cells_in(material.runs), axes):
        lines = [
            line for group in material.groups if (line := _curve(group, measure, cell, axis)) is not None
        ]
        if lines:
            lines = calmed(lines, more)
            panel = Lines(
                AXIS_LABELS[axis],
                spoken(measure),
                [thinned(line) for line in lines],
                percent=is_share(measure),
                bytes=axis == "bytes",
            )
            views[cell, axis] = View(panel, *_curve_words(lines, measure, cell, more))
    if not views:
        return None
    several = any(len(group.runs) > 1 for group in material.groups)
    band = " Lines are means over seeds, bands one standard deviation to either side." if several else ""
    return Figure(
        name=measure,
        title=f"{spoken(measure).capitalize()} while learning",
        about=f"The mean over clients of the {spoken(measure)} on test data, at every evaluation.{band}",
        choices=[
            _used(Choice("cell", "model and data", _cell_words(cells_in(material.runs))), views, 0),
            _used(Choice("axis", "by", axes), views, 1),
        ],
        views=views,
    )


def calmed(lines: list[Line], more: bool) -> list[Line]:
    """Of many lines the best few as they are, on top of the others, which are quiet."""
    if len(lines) <= MOST_LINES:
        return lines
    sign = 1.0 if more else -1.0

    def end(line: Line) -> float:
        return sign * next(value for value in reversed(line.y) if value is not None)

    order = sorted(lines, key=end, reverse=True)
    return [
        *(replace(line, quiet=True, low=None, high=None) for line in order[: BRIGHT - 1 : -1]),
        *order[:BRIGHT],
    ]


def _curve(group: Group, measure: str, cell: str, axis: str) -> Line | None:
    """The mean over the seeds of a group at the rounds all of them have evaluated."""
    by_round: list[dict[int, tuple[float, Number]]] = []
    for run in group.runs:
        points: dict[int, tuple[float, Number]] = {}
        for row in run.evaluated:
            place, scores = row.get(axis), cell_of(row["evaluation"], cell)
            if place is not None and scores is not None:
                points[int(row["round"])] = (float(place), _number(scores.get(measure)))
        by_round.append(points)
    return mean_line(group.label, group.place, by_round)


def mean_line(label: str, place: int, by_round: Sequence[Mapping[int, tuple[float, Number]]]) -> Line | None:
    """The mean over seeds at the rounds that all have; each has where it lies and its value there."""
    rounds = sorted(set.intersection(*(set(points) for points in by_round)))
    if not any(points[round][1] is not None for points in by_round for round in rounds):
        return None
    x: list[Number] = []
    y: list[Number] = []
    deviation: list[Number] = []
    for round in rounds:
        values = [points[round][1] for points in by_round]
        known = [value for value in values if value is not None]
        x.append(float(np.mean([points[round][0] for points in by_round])))
        whole = len(known) == len(values)  # a mean over fewer seeds would make the line jump
        y.append(float(np.mean(known)) if whole else None)
        deviation.append(float(np.std(known, ddof=1)) if whole and len(known) > 1 else None)
    low = high = None
    if len(by_round) > 1:
        pairs = list(zip(y, deviation, strict=True))
        low = [None if mean is None or wide is None else mean - wide for mean, wide in pairs]
        high = [None if mean is None or wide is None else mean + wide for mean, wide in pairs]
    return Line(label, place, x, y, low, high)


def _curve_words(lines: Sequence[Line], measure: str, cell: str, more: bool) -> tuple[str, list[list[str]]]:
    better, word = max if more else min, spoken(measure)
    ends, table = {}, [["method", f"last {word}", f"best {word}"]]
    for line in lines:
        known = [value for value in line.y if value is not None]
        ends[line.label] = known[-1]
        table.append([line.label, _shown(known[-1], measure), _shown(better(known), measure)])
    top = better(ends, key=lambda label: ends[label])
    end = f"At the last evaluation {top} has the {'highest' if better is max else 'lowest'} {word}, "
    sentence = f"{word.capitalize()} of {CELL_WORDS.get(cell, cell)}. {end}{_shown(ends[top], measure)}"
    if len(lines) > 1:
        other = max if better is min else min
        bottom = other(ends, key=lambda label: ends[label])
        least = "lowest" if better is max else "highest"
        sentence += f"; {bottom} has the {least}, {_shown(ends[bottom], measure)}"
    return sentence + ".", table


# -- ranks -----------------------------------------------------------------------------------------------


def ranks(material: Material) -> Figure | None:
    """The critical-difference diagram of every stored comparison of at least three methods."""
    options: dict[str, str] = {}
    views: Views = {}
    for place, compared in enumerate(material.comparisons):
        found = compared.get("ranking")
        if not found or len(found["methods"]) < 3:
            continue
        methods = list(map(str, found["methods"]))
        cliques = [[methods.index(str(name)) for name in clique] for clique in found["cliques"]]
        difference = float(found["critical_difference"])
        panel = Ranks(methods, [float(rank) for rank in found["ranks"]], cliques, difference)
        alike = "; ".join(", ".join(methods[member] for member in clique) for clique in cliques)
        sentence = (
            f"Average ranks over {found['blocks']} clients × seeds, 1 is best: from {methods[0]}, "
            f"{panel.ranks[0]:.2f}, to {methods[-1]}, {panel.ranks[-1]:.2f}. Not told apart, being less than "
            f"{difference:.2f} apart: {alike or 'none'}."
        )
        table = [
            ["method", "average rank"],
            *([m, f"{r:.2f}"] for m, r in zip(methods, panel.ranks, strict=True)),
        ]
        options[str(place)] = f"comparison {place + 1}"
        views[(str(place),)] = View(panel, sentence, table)
    if not views:
        return None
    about = (
        "Methods by their average rank over clients and seeds; a bar joins methods that Nemenyi's test at "
        "0.05 cannot tell apart. Clients of one seed learn from each other, so they are not independent."
    )
    return Figure(
        "ranks", "Critical differences", about, [Choice("comparison", "comparison", options)], views
    )


# -- clients ---------------------------------------------------------------------------------------------


def distribution(material: Material) -> Figure | None:
    """How accuracies and losses are spread over the clients at the last evaluation."""
    views: Views = {}
    cells = [cell for cell in cells_in(material.runs) if cell != "shared_pooled"]
    measures = {measure: spoken(measure) for measure in _measures(material)}
    for cell, measure in product(cells, measures):
        boxes = []
        for group in material.groups:
            values = sorted(value for run in group.runs for value in _client_values(run, cell, measure))
            if values:
                boxes.append(_box(group, values))
        if boxes:
            panel = Boxes(spoken(measure), boxes, percent=is_share(measure))
            views[cell, measure] = View(panel, *_box_words(material, boxes, measure, cell))
    if not views:
        return None
    return Figure(
        name="clients",
        title="How the clients fare",
        about="Each dot is a client (in each seed), at its run's last evaluation. The box holds the middle "
        "half, its line is the median, the broken line the mean; the whiskers end at the lowest and the "
        "highest client.",
        choices=[
            _used(Choice("cell", "model and data", _cell_words(cells)), views, 0),
            _used(Choice("measure", "measure", measures), views, 1),
        ],
        views=views,
    )


def _client_values(run: Run, cell: str, measure: str) -> list[float]:
    name = own_cell(run.last) if cell == OWN else cell
    values = [_number(value) for value in run.clients.get(f"{name}_{measure}", [])]
    return [value for value in values if value is not None]


def _box(group: Group, values: list[float]) -> Box:
    low, lower, middle, upper, high = (float(value) for value in np.percentile(values, (0, 25, 50, 75, 100)))
    chosen = [values[place] for place in evenly(len(values), MOST_POINTS)]
    return Box(group.label, group.place, chosen, (low, lower, middle, upper, high), float(np.mean(values)))


def _box_words(
    material: Material, boxes: Sequence[Box], measure: str, cell: str
) -> tuple[str, list[list[str]]]:
    heads = ["method", "mean", "lowest", "lower quarter", "median", "upper quarter", "highest"]
    more = material.more_is_better(measure)
    heads += ["worst decile"] if more else []
    table = [heads]
    groups = {group.place: group for group in material.groups}
    for box in boxes:
        row = [box.label, _shown(box.mean, measure), *(_shown(value, measure) for value in box.five)]
        if more:
            each = [
                spread(values).worst_decile
                for run in groups[box.place].runs
                if (values := _client_values(run, cell, measure))
            ]
            row.append(_shown(float(np.mean(each)), measure))
        table.append(row)
    widest = max(boxes, key=lambda box: box.five[3] - box.five[1])
    sentence = (
        f"{spoken(measure).capitalize()} of {CELL_WORDS.get(cell, cell)}, client by client. The middle half "
        f"of clients lies widest apart with {widest.label}, from {_shown(widest.five[1], measure)} to "
        f"{_shown(widest.five[3], measure)}."
    )
    return sentence, table


def partitions(material: Material) -> Figure | None:
    """Which client trains on how many samples of which class, for every partition that occurs."""
    made: dict[str, tuple[str, View]] = {}
    for run in material.runs:
        partition = run.partition
        if partition is None or partition.hash in made:
            continue
        counts = partition.counts("train")
        client, label = np.nonzero(counts)
        panel = Dots(
            "client",
            "class",
            list(partition.names),
            [str(number) for number in range(partition.classes)],
            client.tolist(),
            label.tolist(),
            counts[client, label].tolist(),
            "training samples",
        )
        held = (counts > 0).sum(1)
        sizes = counts.sum(1)
        sentence = (
            f"{partition.clients} clients by {partition.name}, seed {partition.seed}: {sizes.min()} to "
            f"{sizes.max()} training samples of {held.min()} to {held.max()} among {partition.classes} "
            f"classes each. The largest dot is {counts.max()} samples."
        )
        table = [["client", "samples", "classes", "largest share"]]
        table += [
            [name, str(int(size)), str(int(kinds)), f"{100 * row.max() / size:.0f} %"]
            for name, size, kinds, row in zip(partition.names, sizes, held, counts, strict=True)
        ]
        words = f"seed {run.seed}, {run.data}, {partition.hash[:8]}"
        made[partition.hash] = (words, View(panel, sentence, table if len(table) <= MOST_POINTS else []))
    if not made:
        return None
    return Figure(
        name="partition",
        title="Who holds what",
        about="A dot's area is the number of training samples of a class at a client.",
        choices=[Choice("partition", "partition", {key: words for key, (words, _) in made.items()})],
        views={(key,): view for key, (_, view) in made.items()},
    )


# -- what methods let be recorded ------------------------------------------------------------------------


def memberships(material: Material) -> Figure | None:
    """Which group each client was in, round by round, for methods that group their clients."""
    options: dict[str, str] = {}
    views: Views = {}
    for key, (label, run) in _numbered(material).items():
        rounds = {}
        for row in run.rounds:
            seen = _observed(row)
            groups = seen.get("groups")
            clients = seen.get("clients", list(range(len(run.names))))  # left out: all of them
            if isinstance(clients, list) and isinstance(groups, list) and len(clients) == len(groups):
                rounds[int(row["round"])] = dict(zip(clients, groups, strict=True))
        if not rounds:
            continue
        kept = [sorted(rounds)[place] for place in evenly(len(rounds), MOST_POINTS)]
        count = max(len(run.names), 1 + max(int(client) for each in rounds.values() for client in each))
        values = [[_number(rounds[round].get(client)) for round in kept] for client in range(count)]
        panel = Grid(
            "round",
            "client",
            "group",
            [str(round) for round in kept],
            [run.name_of(client) for client in range(count)],
            values,
            "groups",
        )
        present = {value for each in rounds.values() for value in each.values()}
        moves = sum(_changes([each.get(client) for each in rounds.values()]) for client in range(count))
        sentence = (
            f"{label}: {count} clients over {len(rounds)} rounds, number of groups: {len(present)}; clients "
            f"changed their group {moves} times in all between the rounds they took part in."
        )
        last = rounds[max(rounds)]
        table = [["group", f"clients in round {max(rounds)}"]]
        for group in sorted(set(last.values())):
            inside = [run.name_of(int(client)) for client, mine in last.items() if mine == group]
            table.append([str(group), ", ".join(inside)])
        options[key], views[key,] = label, View(panel, sentence, table)
    if not views:
        return None
    return Figure(
        name="groups",
        title="Groups over time",
        about="The group of every client in every round; empty where it took no part.",
        choices=[Choice("run", "run", options)],
        views=views,
    )


def similarities(material: Material) -> Figure | None:
    """How similar the clients are to each other, stage by stage of the network."""
    prefix = "similarity_"
    return _heat_maps(
        material,
        wanted=lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None,
        name="similarity",
        title="Similarity between clients",
        about="A row and a column per client; lighter is more alike.",
        option="stage",
        value_label="similarity",
        kind="sequential",
        words=lambda stage, values: f"stage {stage}: {_range(values)}",
    )


def coefficients(material: Material) -> Figure | None:
    """Which clients pull each other together and which push each other apart."""

    def words(_: str, values: np.ndarray) -> str:
        aside = values[~np.eye(len(values), dtype=bool)] if values.shape[0] == values.shape[1] else values
        pull, push = int((aside > 0).sum()), int((aside < 0).sum())
        return f"{pull} pairs attract, {push} repel, {aside.size - pull - push} neither; {_range(values)}"

    return _heat_maps(
        material,
        wanted=lambda name: "coefficients" if name == "coefficients" else None,
        name="coefficients",
        title="Attraction and repulsion",
        about="The weight of the column's client in the row's target: blue pulls, orange pushes away.",
        option="",
        value_label="coefficient",
        kind="diverging",
        words=words,
    )


def _heat_maps(
    material: Material,
    *,
    wanted: Callable[[str], str | None],
    name: str,
    title: str,
    about: str,
    option: str,
    value_label: str,
    kind: str,
    words: Callable[[str, np.ndarray], str],
) -> Figure | None:
    """Client × client matrices of ``observed``, by run, by what they are of, and by round."""
    found: dict[tuple[str, str, int], np.ndarray] = {}
    runs = _numbered(material)
    for key, (_, run) in runs.items():
        for row in run.rounds:
            for entry, value in _observed(row).items():
                part, matrix = wanted(entry), _matrix(value)
                if part is not None and matrix is not None:
                    found[key, part, int(row["round"])] = matrix
    if not found:
        return None
    parts = list(dict.fromkeys(part for _, part, _ in found))
    rounds = sorted({round for _, _, round in found})
    largest = max(matrix.size for matrix in found.values())
    pictures = len({(key, part) for key, part, _ in found})
    room = max(1, MOST_NUMBERS // (largest * pictures))
    kept = {rounds[place] for place in evenly(len(rounds), room)}
    views: Views = {}
    for (key, part, round), matrix in found.items():
        if round not in kept:
            continue
        label, run = runs[key]
        names = [run.name_of(client) for client in range(len(matrix))]
        across = names if matrix.shape[1] == len(names) else [str(i) for i in range(matrix.shape[1])]
        values = [[_number(value) for value in line] for line in matrix.tolist()]
        panel = Grid("client", "client", value_label, across, names, values, kind)
        sentence = f"{label}, round {round}, {words(part, matrix)}."
        views[key, part, str(round)] = View(panel, sentence)
    left_out = "" if len(kept) == len(rounds) else f" {len(kept)} of {len(rounds)} rounds are kept here."
    return Figure(
        name=name,
        title=title,
        about=about + left_out,
        choices=[
            Choice("run", "run", {key: label for key, (label, _) in runs.items() if _has(views, 0, key)}),
            Choice("part", option, {part: part for part in parts}),
            Choice(
                "step", "round", {str(round): str(round) for round in rounds if round in kept}, steps=True
            ),
        ],
        views=views,
    )


def observations(material: Material) -> Figure | None:
    """Single numbers that methods report about themselves, by round."""
    quantities: dict[str, list[Line]] = {}
    for group in material.groups:
        for quantity in dict.fromkeys(
            name for run in group.runs for row in run.rounds for name in _observed(row)
        ):
            by_round = [
                {
                    int(row["round"]): value
                    for row in run.rounds
                    if (value := _scalar(row, quantity)) is not None
                }
                for run in group.runs
            ]
            rounds = sorted(set.intersection(*(set(values) for values in by_round)))
            if rounds:
                y: list[Number] = [float(np.mean([each[round] for each in by_round])) for round in rounds]
                line = Line(group.label, group.place, [float(round) for round in rounds], y)
                quantities.setdefault(quantity, []).append(line)
    if not quantities:
        return None
    views: Views = {}
    for quantity, lines in quantities.items():
        table = [["method", "first", "last"]]
        table += [[line.label, _shown(line.y[0]), _shown(line.y[-1])] for line in lines]
        ends = "; ".join(f"{line.label} from {_shown(line.y[0])} to {_shown(line.y[-1])}" for line in lines)
        words = quantity.replace("_", " ")
        panel = Lines("round", words, [thinned(line) for line in lines])
        views[quantity,] = View(panel, f"{words.capitalize()}: {ends}.", table)
    return Figure(
        name="observations",
        title="What the methods report",
        about="Numbers a method lets be recorded about itself, round by round; means over seeds.",
        choices=[
            Choice("quantity", "quantity", {key: key.replace("_", " ") for key in quantities}),
        ],
        views=views,
    )


def arrivals(material: Material) -> Figure | None:
    """Who trained when, and how old its model was on arrival, for asynchronous runs."""
    options: dict[str, str] = {}
    views: Views = {}
    for key, (label, run) in _numbered(material).items():
        jobs = [
            [float(part) for part in job]
            for row in run.rounds
            for job in row.get("arrivals") or ()
            if isinstance(job, list) and len(job) >= 5 and all(_number(part) is not None for part in job)
        ]
        if not jobs:
            continue
        jobs.sort(key=lambda job: job[2])
        shown = jobs[-MOST_SPANS:]
        clients = sorted({int(job[0]) for job in shown})
        rows = {client: row for row, client in enumerate(clients)}
        names = [run.name_of(client) for client in clients]
        panel = Spans(
            "virtual time",
            "client",
            "age in versions",
            names,
            [rows[int(job[0])] for job in shown],
            [job[1] for job in shown],
            [job[2] for job in shown],
            [job[4] for job in shown],
            [f"{run.name_of(int(job[0]))}: from version {job[3]:g}, age {job[4]:g}" for job in shown],
        )
        ages = np.array([job[4] for job in jobs])
        sentence = (
            f"{label}: {len(jobs)} arrivals of {len({job[0] for job in jobs})} clients up to virtual time "
            f"{_shown(jobs[-1][2])}; on arrival a reply's model was {ages.mean():.3g} versions old on "
            f"average, {ages.max():g} at most."
        )
        if len(shown) < len(jobs):
            sentence += f" The latest {len(shown)} are drawn."
        options[key], views[key,] = label, View(panel, sentence)
    if not views:
        return None
    return Figure(
        name="arrivals",
        title="Arrivals",
        about="A bar is a client at work, from the model's leaving to the reply's arrival; lighter bars "
        "bring older models' replies, measured in versions the server has made meanwhile.",
        choices=[Choice("run", "run", options)],
        views=views,
    )


# -- helpers ---------------------------------------------------------------------------------------------


def _numbered(material: Material) -> dict[str, tuple[str, Run]]:
    """Every run by a short key, with its label."""
    return {str(number): (label, run) for number, (label, _, run) in enumerate(material.labelled())}


def _observed(row: Mapping[str, Any]) -> Mapping[str, Any]:
    seen = row.get("observed")
    return seen if isinstance(seen, Mapping) else {}


def _scalar(row: Mapping[str, Any], name: str) -> Number:
    value = _observed(row).get(name)
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return None if isinstance(value, bool) else _number(value)


def _matrix(value: Any) -> np.ndarray | None:
    """A matrix of numbers, with nan where one was not finite; None for anything else."""
    if not isinstance(value, list) or not value or not isinstance(value[0], list):
        return None
    try:
        matrix = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    return matrix if matrix.ndim == 2 and matrix.size else None


def _number(value: Any) -> Number:
    """A finite number, or None."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _changes(seen: Iterable[Any]) -> int:
    present = [value for value in seen if value is not None]
    return sum(before != after for before, after in pairwise(present))


def _range(values: np.ndarray) -> str:
    known = values[np.isfinite(values)]
    if not known.size:
        return "no finite value"
    return f"from {known.min():.3g} to {known.max():.3g}, {known.mean():.3g} on average"


def _shown(value: Number, measure: str = "") -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if is_share(measure) else f"{value:.4g}"


def spoken(measure: str) -> str:
    """What a metric is called in a sentence."""
    return measure.replace("_", " ")


def evenly(count: int, most: int) -> list[int]:
    """At most so many places among ``count``, the first (where more than one) and the last among them.

    >>> evenly(3, 5), evenly(9, 3), evenly(9, 1)
    ([0, 1, 2], [0, 4, 8], [8])
    """
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def thinned(line: Line) -> Line:
    """A line of at most :data:`MOST_POINTS` points."""
    places = evenly(len(line.x), MOST_POINTS)

    def chosen(values: list[Number] | None) -> list[Number] | None:
        return None if values is None else [values[place] for place in places]

    return Line(
        line.label,
        line.place,
        chosen(line.x) or [],
        chosen(line.y) or [],
        chosen(line.low),
        chosen(line.high),
        line.quiet,
        line.hollow,
    )


def _cell_words(cells: Iterable[str]) -> dict[str, str]:
    return {cell: CELL_WORDS.get(cell, cell.replace("_", " ")) for cell in cells}


def _has(views: Views, place: int, option: str) -> bool:
    return any(key[place] == option for key in views)


def _used(choice: Choice, views: Views, place: int) -> Choice:
    """The choice without options that no view has."""
    options = {key: words for key, words in choice.options.items() if _has(views, place, key)}
    return Choice(choice.name, choice.label, options, choice.steps)
