"""The tables of a report as plain data: the comparison of methods and the statistics stored with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sartor.report.runs import CELL_WORDS, OWN, Group, Material, Run, cell_of, cells_in, mean_and_deviation
from sartor.runs.metrics import is_share
from sartor.runs.participation import by_round

WORST = "worst decile"
MOST_NAMED = 10
"""Clients that are named in a table."""


@dataclass(frozen=True)
class Entry:
    """A cell of a table: what is shown, and what it is sorted by (None comes last)."""

    text: str
    value: float | str | None
    best: bool = False
    """Whether it is the best of its column, as far as the shown digits tell."""


@dataclass(frozen=True)
class Table:
    """A table that can be sorted by any column."""

    title: str
    about: str
    heads: list[str]
    rows: list[list[Entry]]


def comparison(material: Material) -> Table:
    """A row per method: means over its seeds with their standard deviation, after the last round."""
    columns = _columns(material)
    groups = _sorted(material)
    cells = [_marked([_over_seeds(group, column) for group in groups], column.more) for column in columns]
    rows = [
        [Entry(group.label, group.label), Entry(str(len(group.runs)), float(len(group.runs)))]
        + [column[place] for column in cells]
        for place, group in enumerate(groups)
    ]
    several = any(len(group.runs) > 1 for group in material.groups)
    spread = "; ± is the standard deviation over seeds" if several else ""
    about = f"At each run's last evaluation, plain means over clients{spread}."
    if len(groups) > 1:
        about += " The best method comes first, by clients' own test data; the best of each column is bold."
    if any(column.head == WORST for column in columns):
        about += (
            " Accuracies are in percent. The worst decile is the mean of the worst tenth of clients on "
            "their own test data, with their personal model, or with the shared one where there is no other."
        )
    return Table(
        "Comparison",
        about,
        ["method", "seeds", *(column.head for column in columns)],
        rows,
    )


@dataclass(frozen=True)
class _Column:
    """Its head, the value of a run, how that is written, and whether its spread over seeds is of interest."""

    head: str
    of: Callable[[Run], float | None]
    words: Callable[[float], str]
    spread: bool = True
    more: bool = False
    """Whether more is better."""


def _columns(material: Material) -> list[_Column]:
    """Every column that some run has a value for."""
    score = material.headline
    shown = _percent if is_share(score) else "{:.4g}".format
    more = material.more_is_better(score)

    def of_cell(cell: str, *path: str) -> Callable[[Run], float | None]:
        def value(run: Run) -> float | None:
            found: Any = cell_of(run.last, cell)
            for step in path:
                found = found.get(step) if isinstance(found, dict) else None
            return float(found) if isinstance(found, (int, float)) else None

        return value

    def validated(run: Run) -> float | None:
        best = (run.summary or {}).get("best_by_validation", {})
        found = cell_of({name: cell for name, cell in best.items() if cell}, OWN)
        return None if found is None else found.get(score)

    def sent(run: Run) -> float | None:
        return float(sum((row.get("bytes_down") or 0) + (row.get("bytes_up") or 0) for row in run.rounds))

    def epsilon(run: Run) -> float | None:
        spent: float | None = run.rounds[-1].get("epsilon") if run.rounds else None
        return spent

    def seconds(run: Run) -> float | None:
        return float(sum(row.get("seconds") or 0 for row in run.rounds))

    cells = [cell for cell in cells_in(material.runs) if cell != OWN and not cell.endswith("validation")]
    cells = [] if score == "loss" else cells  # which has its column below
    judged = [
        _Column(WORST, of_cell(OWN, f"{score}_spread", "worst_decile"), shown, more=more),
        _Column("best by validation", validated, shown, more=more),
    ]
    columns = [
        *(_Column(CELL_WORDS.get(cell, cell), of_cell(cell, score), shown, more=more) for cell in cells),
        *(judged if score != "loss" else ()),
        _Column("honest clients", of_cell(OWN, "benign", score), shown, more=more),
        _Column("attack succeeds", of_cell(OWN, "attack_success"), _percent),
        _Column("loss, own test data", of_cell(OWN, "loss"), lambda value: f"{value:.4f}"),
        _Column("ε spent", epsilon, "{:.3g}".format, spread=False),
        _Column("MB sent", sent, lambda value: f"{value / 1e6:.1f}", spread=False),
        _Column("seconds of training", seconds, lambda value: f"{value:.1f}", spread=False),
    ]
    return [column for column in columns if any(column.of(run) is not None for run in material.runs)]


def _sorted(material: Material) -> list[Group]:
    """The methods, the best on clients' own test data first."""
    score = material.headline
    sign = -1.0 if material.more_is_better(score) else 1.0

    def place(group: Group) -> float:
        found = [(cell_of(run.last, OWN) or {}).get(score) for run in group.runs]
        mean, _ = mean_and_deviation(found)
        return float("inf") if mean is None else sign * mean

    return sorted(material.groups, key=place)


def _marked(entries: list[Entry], more: bool) -> list[Entry]:
    """A column with its best entries marked: those that look as good as the best."""
    there = [entry for entry in entries if isinstance(entry.value, float)]
    if len(entries) < 2 or not there:
        return entries
    best = (max if more else min)(there, key=lambda entry: float(entry.value or 0.0)).text.split(" ±")[0]
    return [replace(entry, best=entry.text.split(" ±")[0] == best) for entry in entries]


def participation(material: Material) -> Table | None:
    """A row per run: in how many rounds its clients took part; None where no run says who did."""
    rows = []
    for label, _, run in material.labelled():
        rounds = by_round(run.rounds)
        if not rounds or not run.names:
            continue
        heard = np.array([client for clients in rounds.values() for client in clients], dtype=np.int64)
        times = np.bincount(heard, minlength=len(run.names))
        never = [run.name_of(client) for client in np.flatnonzero(times == 0).tolist()]
        named = ", ".join(never[:MOST_NAMED]) + (
            f" and {len(never) - MOST_NAMED} more" if never[MOST_NAMED:] else ""
        )
        numbers = [len(rounds), times.min(), np.median(times), times.max(), len(never)]
        entries = [Entry(f"{number:g}", float(number)) for number in numbers]
        rows.append([Entry(label, label), *entries, Entry(named or "–", named)])
    if not rows:
        return None
    about = (
        "In how many rounds a client's answer was used: the least and the most often heard, and the median."
    )
    heads = ["run", "rounds", "least", "median", "most", "never heard", "who"]
    return Table("Who took part", about, heads, rows)


def privacy(material: Material) -> Table | None:
    """A row per run that hides its clients or their samples: what that has cost; None where no run does."""
    rows = []
    for label, _, run in material.labelled():
        told = (run.summary or {}).get("privacy")
        if told:
            hidden = "a sample" if told["mode"] == "samples" else "a client"
            whom = f"{hidden} {'more or less' if told['neighbours'] == 'add-remove' else 'replaced'}"
            words = [label, told["mode"], whom]
            numbers = [told[key] for key in ("epsilon", "delta", "noise", "clip")]
            entries = [Entry("–" if number is None else f"{number:.4g}", number) for number in numbers]
            rows.append([*(Entry(word, word) for word in words), *entries])
    if not rows:
        return None
    about = "What was spent by the end, on hiding what is named: docs/privacy.md says what that means."
    heads = ["run", "mode", "hides", "ε", "δ", "noise multiplier", "clip"]
    return Table("Privacy", about, heads, rows)


def attacks(material: Material) -> Table | None:
    """A row per run with attackers: who they are, and how they and the others fare; None where nobody is."""
    rows = []
    score = material.headline
    shown = _percent if is_share(score) else "{:.4g}".format
    for label, _, run in material.labelled():
        bad = [bool(value) for value in run.clients.get("attacker", [])]
        if not any(bad):
            continue
        cell = "personal_local" if "personal_local" in run.last else "shared_local"
        values = run.clients.get(f"{cell}_{score}", [None] * len(bad))
        pairs = list(zip(values, bad, strict=True))
        means = [
            mean_and_deviation([value for value, is_bad in pairs if is_bad is which])[0]
            for which in (False, True)
        ]
        names = [str(name) for name, is_bad in zip(run.clients["client"], bad, strict=True) if is_bad]
        named = ", ".join(names[:MOST_NAMED]) + (
            f" and {len(names) - MOST_NAMED} more" if names[MOST_NAMED:] else ""
        )
        name = str(run.config.get("attack", {}).get("name", "unknown"))
        rule = str(run.config.get("aggregate", {}).get("name", "mean"))
        entries = [Entry(text, text) for text in (label, name, rule)]
        entries.append(Entry(f"{len(names)} of {len(bad)}", float(len(names))))
        entries += [Entry("–" if mean is None else shown(mean), mean) for mean in means]
        rows.append([*entries, Entry(named, named)])
    if not rows:
        return None
    about = (
        f"Clients that misbehave in a simulation, and the {score} of the others and of themselves on own "
        "test data at the last evaluation, plain means."
    )
    heads = ["run", "attack", "aggregate", "attackers", "honest clients", "attackers' own", "who"]
    return Table("Attackers", about, heads, rows)


def _over_seeds(group: Group, column: _Column) -> Entry:
    mean, deviation = mean_and_deviation([column.of(run) for run in group.runs])
    if mean is None:
        return Entry("–", None)
    text = column.words(mean)
    return Entry(
        text if deviation is None or not column.spread else f"{text} ± {column.words(deviation)}", mean
    )


def own_models(material: Material) -> list[Table]:
    """How clients fare with each network, where they have networks of their own; a row for each."""
    rows = []
    for group in material.groups:
        scored: dict[str, list[float]] = {}
        for run in group.runs:
            cell = "personal_local" if "personal_local" in run.last else "shared_local"
            found = run.clients.get(f"{cell}_accuracy", [])
            for name, value in zip(run.clients.get("model", []), found, strict=False):
                scored.setdefault(name, []).extend([] if value is None else [float(value)])
        for name, values in scored.items():
            mean = sum(values) / len(values) if values else None
            entries = [
                Entry(group.label, group.label),
                Entry(name, name),
                Entry(str(len(values)), len(values)),
            ]
            rows.append([*entries, Entry("–" if mean is None else _percent(mean), mean)])
    if not rows:
        return []
    about = "At each run's last evaluation, plain means over a network's clients on their own test data."
    return [Table("Networks of clients' own", about, ["method", "network", "clients", "accuracy (%)"], rows)]


def statistics(compared: Mapping[str, Any]) -> list[Table]:
    """What a stored comparison has found: pairs of methods, average ranks, and what a target took."""
    tables = []
    score = str(compared.get("score"))
    share = is_share(score)

    def difference(value: float) -> str:
        return f"{100 * value:+.1f}" if share else f"{value:+.4g}"

    if compared.get("pairs"):
        rows = []
        for pair in compared["pairs"]:
            low, high = pair["interval"]
            rows.append(
                [
                    Entry(pair["first"], pair["first"]),
                    Entry(pair["second"], pair["second"]),
                    Entry(
                        f"{pair['better']} / {pair['equal']} / {pair['worse']}",
                        pair["better"] - pair["worse"],
                    ),
                    Entry(
                        f"{difference(pair['mean_difference'])} ({difference(low)} to {difference(high)})",
                        pair["mean_difference"],
                    ),
                    Entry(f"{pair['rank_biserial']:+.2f}", pair["rank_biserial"]),
                    Entry(_probability(pair["p"]), pair["p"]),
                    Entry(_probability(pair["p_holm"]), pair["p_holm"]),
                ]
            )
        unit = f"percentage points of {score.replace('_', ' ')}" if share else score.replace("_", " ")
        heads = ["method", "against", "better / equal / worse", f"mean difference, {unit} (95 %)"]
        tables.append(
            Table(
                "Paired differences",
                f"Over {compared['pairs'][0]['pairs']} clients × seeds, each client's result under the one "
                "method against its result under the other: Wilcoxon's signed-rank test, corrected for the "
                "number of pairs after Holm, and the matched-pairs rank-biserial correlation. A positive "
                "difference is in favour of the first. Clients of one seed learn from each other, so they "
                "are not independent.",
                [*heads, "rank-biserial", "p", "p (Holm)"],
                rows,
            )
        )
    ranked = compared.get("ranking")
    if ranked:
        alike = "; ".join(", ".join(clique) for clique in ranked["cliques"]) or "none"
        tables.append(
            Table(
                "Average ranks",
                f"1 is best, over {ranked['blocks']} clients × seeds. Friedman's test: "
                f"{ranked['statistic']:.4g}, p {_probability(ranked['p'])}. Methods whose ranks are less "
                f"than {ranked['critical_difference']:.3g} apart (Nemenyi, 0.05) are not told apart: "
                f"{alike}.",
                ["method", "average rank"],
                [
                    [Entry(method, method), Entry(f"{rank:.2f}", rank)]
                    for method, rank in zip(ranked["methods"], ranked["ranks"], strict=True)
                ],
            )
        )
    reached = [method for method in compared["methods"] if method.get("to_target")]
    if reached:
        rows = []
        for method in reached:
            took = method["to_target"]
            count = f"{took['reached']} of {len(method['runs'])}"
            row = [Entry(method["label"], method["label"]), Entry(count, took["reached"])]
            for key, words in (("rounds", "{:.1f}"), ("bytes", "{:.1f}"), ("seconds", "{:.1f}")):
                mean = took[key]["mean"]
                scale = 1e6 if key == "bytes" else 1.0
                row.append(Entry("–" if mean is None else words.format(mean / scale), mean))
            rows.append(row)
        tables.append(
            Table(
                f"Way to a {compared['score']} of {compared['target']:g}",
                "Means over the seeds that reached it, up to the first evaluation there.",
                ["method", "seeds that reached it", "rounds", "MB sent", "seconds"],
                rows,
            )
        )
    return tables


def settings(rows: Sequence[tuple[str, Any]]) -> list[list[str]]:
    """Keys and values as text."""
    return [[key, _word(value)] for key, value in rows]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _probability(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "–" if value is None else str(value)
