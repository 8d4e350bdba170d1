"""Is it worth it for my site? Each client's own, shared and lonely model on its own test data.

Intervals are of 95 %, by the bootstrap over the client's test samples: all models of a client are judged on
the same draws, which follow from the client's name. Where all seeds have the same samples, as where a table
says which are for testing, a sample is drawn in all of them at once. Training alone is the run of
``separate`` beside the method's, on the same clients and samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sartor import random
from sartor.report.figures import Choice, Figure, Line, Lines, View, Views
from sartor.report.runs import OWN, Group, Material, Run, cell_of, own_cell
from sartor.report.tables import Entry, Table
from sartor.runs.outputs import Outputs

ALONE = "separate"
DRAWS = 1000
MOST_DRAWN = 4_000_000
"""Numbers drawn for a client; of more samples fewer draws are made."""
FEWEST = 6
"""Of fewer test samples nothing is beyond chance: five that all favour one model come with p = 1/16."""
MOST_SENTENCES = 6
MOST_CURVES = 20
"""Clients that curves can be chosen of."""
BINS = 10
MODELS = {"own": "own model", "shared": "shared model", "alone": "trained alone"}
Floats = np.ndarray


@dataclass(frozen=True)
class Score:
    """What models are judged by: a number for each row of weights of the samples."""

    name: str
    more: bool
    share: bool
    of: Callable[[Floats, Floats, Floats], Floats]
    """From weights ``[draws, samples]``, truth and outputs."""

    def shown(self, value: float, signed: bool = False) -> str:
        """A value, or a difference, in words."""
        sign = "+" if signed else ""
        return f"{100 * value:{sign}.1f}" if self.share else f"{value:{sign}.4g}"


def _accuracy(weights: Floats, truth: Floats, outputs: Floats) -> Floats:
    return np.asarray(weights @ (outputs.argmax(1) == truth) / weights.sum(1))


def _balanced(weights: Floats, truth: Floats, outputs: Floats) -> Floats:
    right = outputs.argmax(1) == truth
    recalls = []
    for label in np.unique(truth):
        mine = (truth == label).astype(float)
        there = weights @ mine
        recalls.append(np.where(there > 0, weights @ (mine * right) / np.maximum(there, 1e-300), np.nan))
    return np.asarray(np.nanmean(recalls, axis=0))


def _mean_error(power: int) -> Callable[[Floats, Floats, Floats], Floats]:
    def error(weights: Floats, truth: Floats, outputs: Floats) -> Floats:
        away = np.abs(outputs.reshape(truth.shape) - truth) ** power
        mean = weights @ away / weights.sum(1)
        return np.asarray(np.sqrt(mean) if power == 2 else mean)

    return error


SCORES = {
    "accuracy": Score("accuracy", True, True, _accuracy),
    "balanced_accuracy": Score("balanced accuracy", True, True, _balanced),
    "rmse": Score("rmse", False, False, _mean_error(2)),
    "mae": Score("mae", False, False, _mean_error(1)),
}


@dataclass(frozen=True)
class Part:
    """The samples of one client in one split, over all seeds: truth, what models say, and groups."""

    truth: Floats
    by_model: dict[str, Floats]
    group: Floats | None
    repeated: int = 1
    """How many seeds have the same samples, those of one behind those of the other."""

    @property
    def count(self) -> int:
        """How many samples there are."""
        return len(self.truth) // self.repeated

    def some(self, rows: Floats) -> Part:
        """Some of the samples."""
        models = {name: outputs[rows] for name, outputs in self.by_model.items()}
        group = None if self.group is None else self.group[rows]
        return Part(self.truth[rows], models, group, self.repeated)


@dataclass(frozen=True, eq=False)
class Site:
    """One client: its samples, and its models' scores with their intervals."""

    name: str
    test: Part
    validation: Part | None
    score: Score
    seed: int
    paired: bool = True
    """Whether it is known of each sample what every model says; else each model has draws of its own."""
    drawn: dict[str, Floats] = field(default_factory=dict)

    @cached_property
    def weights(self) -> Floats:
        """How often each sample is in each draw; the first row is the samples as they are."""
        return self._weights(self.name)

    def _weights(self, name: str) -> Floats:
        return np.tile(_weights(self.test.count, self.seed, name), self.test.repeated)

    def scores(self, model: str) -> Floats:
        """A model's score on the samples, and on every draw of them."""
        if model not in self.drawn:
            own = self.weights if self.paired else self._weights(f"{model} {self.name}")
            self.drawn[model] = self.score.of(own, self.test.truth, self.test.by_model[model])
        return self.drawn[model]

    def value(self, model: str) -> tuple[float, float, float] | None:
        """A model's score and its interval; None where there is no such model."""
        return _interval(self.scores(model)) if model in self.test.by_model else None

    def gain(self, over: str = "alone") -> tuple[float, float, float] | None:
        """How much better the own model is than another, with its interval; positive is better."""
        if not {"own", over} <= set(self.test.by_model):
            return None
        sign = 1.0 if self.score.more else -1.0
        return _interval(sign * (self.scores("own") - self.scores(over)))

    @property
    def beyond_chance(self) -> bool:
        """Whether there is a gain or a loss over training alone that is no chance."""
        gain = self.gain()
        return gain is not None and self.test.count >= FEWEST and (gain[1] > 0 or gain[2] < 0)

    def sentence(self) -> str | None:
        """Whether it is worth it, in words."""
        gain = self.gain()
        if gain is None:
            return None
        mean, low, high = gain
        who = f"Client {self.name}" if self.name.isdecimal() else self.name
        unit = "points" if self.score.share else self.score.name
        size = self.score.shown(abs(mean))
        ends = f"(95 % {self.score.shown(low)} to {self.score.shown(high)})"
        if mean == 0:
            return f"{who} is as well off as training alone {ends}"
        word = "gains" if mean > 0 else "loses"
        unsure = "" if self.beyond_chance else ", which may be chance"
        return f"{who} {word} {size} {unit} over training alone {ends}{unsure}"


def _weights(count: int, seed: int, name: str) -> Floats:
    draws = max(100, min(DRAWS, MOST_DRAWN // max(count, 1)))
    key = random.stream(seed, "sites", zlib.crc32(name.encode()))
    places = (random.uniform(key, draws * count) * count).long().numpy().reshape(draws, count)
    weights = np.zeros((draws + 1, count))
    weights[0] = 1.0
    np.add.at(weights, (np.repeat(np.arange(1, draws + 1), count), places.ravel()), 1.0)
    return weights


def _interval(values: Floats) -> tuple[float, float, float]:
    there = values[1:][np.isfinite(values[1:])]
    low, high = np.quantile(there, [0.025, 0.975]) if len(there) else (np.nan, np.nan)
    return float(values[0]), float(low), float(high)


@dataclass(frozen=True)
class Sites:
    """The clients under one method, beside training alone where there are such runs."""

    group: Group
    alone: bool
    chosen: str
    """How the method was chosen among several; empty where it was the only one."""
    by: str | None
    sites: list[Site]
    counted: bool = False
    """Whether single samples are not known, but how many each model gets right."""

    @property
    def classes(self) -> bool:
        """Whether it is known which class models see in single samples, and how sure they are."""
        return not self.counted and self.sites[0].score.share

    def sentences(self) -> list[str]:
        """What to say on top of the page: a sentence for each client, or for the outermost of many."""
        told = [
            (gain[0], site.beyond_chance, sentence)
            for site in self.sites
            if (gain := site.gain()) is not None and (sentence := site.sentence()) is not None
        ]
        if not told:
            return []
        sure = [gain for gain, beyond, _ in told if beyond]
        better, worse = sum(gain > 0 for gain in sure), sum(gain < 0 for gain in sure)
        lines = [sentence for _, _, sentence in told]
        if len(lines) > MOST_SENTENCES:
            order = sorted(range(len(told)), key=lambda place: told[place][0])
            half = MOST_SENTENCES // 2
            lines = [lines[place] for place in (*order[::-1][:half], *order[:half][::-1])]
        rest = len(told) - better - worse
        count = f"With {self.group.label} {better} of {len(told)} clients gain over training alone beyond "
        count += f"chance, {worse} lose, and of {rest} the test data cannot tell"
        return [f"{line}." for line in (count, *lines)]


def sites_of(material: Material) -> Sites | None:
    """The clients of the method that is best, by what models say of single samples, or else by counts.

    By counts too where those alone tell what training alone gives.
    """
    score = SCORES.get(material.headline)
    if score is None:
        return None
    judged = [group for group in material.groups if _judged(group, material.headline)]
    known = [group for group in judged if _said(group) or _counts(group, score)]
    methods = [group for group in known if group.runs[0].algorithm != ALONE]
    if not methods:
        return None
    group, chosen = _best(methods, material.headline, score.more)
    others = [group.label for group in material.groups if group not in judged]
    if others:
        chosen += f" Left out, as they have no {score.name}: {', '.join(others)}."
    unknown = [group.label for group in judged if group not in known]
    if unknown:
        chosen += f" Left out, as what models say of single samples is not stored: {', '.join(unknown)}."
    lonely = [group for group in known if group.runs[0].algorithm == ALONE]
    found = [by(group, lonely, chosen, score) for by in (_by_samples, _by_counts)]
    return max((sites for sites in found if sites is not None), key=lambda sites: sites.alone, default=None)


def _own(run: Run) -> str:
    """Which model is a client's own: the personal one or, without such, the shared one."""
    return own_cell(run.last).removesuffix("_local")


def _judged(group: Group, headline: str) -> bool:
    """Whether clients' own models have this score."""
    return all((cell_of(run.last, OWN) or {}).get(headline) is not None for run in group.runs)


def _said(group: Group) -> bool:
    """Whether it is stored what clients' own models say of single samples."""
    return all(
        run.outputs and all(_own(run) in split.by_model for split in run.outputs.values())
        for run in group.runs
    )


def _counts(group: Group, score: Score) -> bool:
    """Whether it is stored how many samples clients' own models get right; not how many labels or pixels."""
    return score is SCORES["accuracy"] and all(
        "n_test" in run.clients
        and all(map(_is_count, run.clients["n_test"], run.clients.get(f"{own_cell(run.last)}_accuracy", ())))
        for run in group.runs
    )


def _is_count(samples: int | None, share: float | None) -> bool:
    """Whether a share can be one of so many samples; stored numbers are rounded."""
    right = (share or 0.0) * (samples or 0)
    return abs(right - round(right)) < 0.01


def _repeated(group: Group) -> int:
    """How many seeds have the same samples: all of them or each its own."""
    same = len({run.hash for run in group.runs}) == 1 and group.runs[0].hash is not None
    return len(group.runs) if same else 1


def _by_counts(group: Group, lonely: Sequence[Group], chosen: str, score: Score) -> Sites | None:
    """The clients by how many samples each model gets right: of runs on real machines there is no more."""
    if not _counts(group, score):
        return None
    beside = [run for other in lonely if _counts(other, score) for run in other.runs]
    pairs = []
    for run in group.runs:
        same = (o for o in beside if (o.seed, o.hash, o.names) == (run.seed, run.hash, run.names))
        pairs.append((run, next(same, None)))
    alone = all(other is not None for _, other in pairs)
    sites = []
    for place, name in enumerate(group.runs[0].names):
        parts = [_counted(run, other if alone else None, place) for run, other in pairs]
        if all(part.count for part in parts):
            test = _together(parts, _repeated(group))
            sites.append(Site(name, test, None, score, group.runs[0].seed, paired=False))
    return Sites(group, alone, chosen, None, sites, counted=True) if sites else None


def _counted(run: Run, other: Run | None, place: int) -> Part:
    """Samples of which a model's share is right, as it was measured; which ones is not known."""
    count = int(run.clients["n_test"][place] or 0)
    named: dict[str, Floats] = {}
    wanted = [
        (own_cell(run.last), "own", run),
        ("shared_local", "shared", run),
        ("personal_local", "alone", other),
    ]
    for cell, model, source in wanted:
        found = (
            None if source is None else source.clients.get(f"{cell}_accuracy", [None] * (place + 1))[place]
        )
        if found is not None:
            right = np.arange(count) < round(float(found) * count)
            named[model] = np.stack([right, ~right], 1).astype(float)
    return Part(np.zeros(count, np.int64), named, None)


def _by_samples(group: Group, lonely: Sequence[Group], chosen: str, score: Score) -> Sites | None:
    """The clients by what models say of each of their samples."""
    if not _said(group):
        return None
    beside = [run for other in lonely if _said(other) for run in other.runs]
    pairs = [(run, _beside(run, beside)) for run in group.runs]
    alone = all(other is not None for _, other in pairs)
    names = group.runs[0].outputs["test"].names
    sites = []
    for number, name in enumerate(names):
        parts = {
            split: _part(
                [(run, other if alone else None) for run, other in pairs], split, number, _repeated(group)
            )
            for split in ("test", "validation")
        }
        test = parts["test"]
        if test is not None and test.count:
            sites.append(Site(name, test, parts["validation"], score, group.runs[0].seed))
    by = group.runs[0].config.get("evaluate", {}).get("by")
    return Sites(group, alone, chosen, by, sites) if sites else None


def _best(methods: Sequence[Group], headline: str, more: bool) -> tuple[Group, str]:
    """The method to speak of: the only one, or the best, on validation data where there are any."""
    if len(methods) == 1:
        return methods[0], ""

    def value(group: Group, split: str) -> float | None:
        found = []
        for run in group.runs:
            cells = [run.last.get(f"{kind}_{split}") for kind in ("personal", "shared")]
            cell = next((cell for cell in cells if cell is not None), None)
            score = None if cell is None else cell.get(headline)
            if score is None:
                return None
            found.append(float(score))
        return float(np.mean(found))

    for split in ("validation", "local"):
        values = [value(group, split) for group in methods]
        if all(each is not None for each in values):
            sign = 1.0 if more else -1.0
            place = max(range(len(methods)), key=lambda place: sign * float(values[place] or 0.0))
            on = (
                "on validation data"
                if split == "validation"
                else "on the same test data, so that it looks a little better than it is; set data.validation"
            )
            return methods[place], f" It is the best of {len(methods)} methods, chosen {on}."
    return methods[0], " It is the first of several methods."


def _beside(run: Run, others: Sequence[Run]) -> Run | None:
    """The run alone on the same samples."""
    for other in others:
        if other.seed == run.seed and other.hash == run.hash:
            mine, theirs = run.outputs["test"], other.outputs["test"]
            if mine.names == theirs.names and np.array_equal(mine.truth, theirs.truth):
                return other
    return None


def _part(pairs: Sequence[tuple[Run, Run | None]], split: str, number: int, repeated: int) -> Part | None:
    """A client's samples of all seeds."""
    if any(split not in run.outputs for run, _ in pairs):
        return None
    found: list[Part] = []
    for run, other in pairs:
        mine: Outputs = run.outputs[split]
        rows = mine.client == number
        models = {kind: outputs[rows] for kind, outputs in mine.by_model.items()}
        named = {"own": models[_own(run)]}
        named |= {"shared": models["shared"]} if "shared" in models else {}
        if other is not None:
            named["alone"] = other.outputs[split].by_model["personal"][rows]
        found.append(Part(mine.truth[rows], named, None if mine.group is None else mine.group[rows]))
    return _together(found, repeated)


def _together(found: Sequence[Part], repeated: int) -> Part:
    """The samples of several seeds, which may all have the same."""
    common = set.intersection(*(set(part.by_model) for part in found))
    models = {
        name: np.concatenate([part.by_model[name] for part in found]) for name in MODELS if name in common
    }
    groups = [part.group for part in found if part.group is not None]
    group = np.concatenate(groups) if len(groups) == len(found) else None
    return Part(np.concatenate([part.truth for part in found]), models, group, repeated)


# Tables ---------------------------------------------------------------------------------------------------


def site_tables(sites: Sites) -> list[Table]:
    """Each client's models, thresholds of two classes, and subgroups where a column is named."""
    return [table for make in (_worth, _thresholds, _subgroups) if (table := make(sites)) is not None]


def _with_interval(value: tuple[float, float, float] | None, score: Score, signed: bool = False) -> Entry:
    if value is None or not np.isfinite(value[0]):
        return Entry("–", None)
    mean, low, high = value
    text = score.shown(mean, signed)
    if np.isfinite(low):
        text += f" ({score.shown(low, signed)} to {score.shown(high, signed)})"
    return Entry(text, mean)


def _worth(sites: Sites) -> Table:
    models = [name for name in MODELS if all(name in site.test.by_model for site in sites.sites)]
    score = sites.sites[0].score
    rows = []
    for site in sites.sites:
        row = [Entry(site.name, site.name), Entry(str(site.test.count), float(site.test.count))]
        row += [_with_interval(site.value(model), score) for model in models]
        row += [_with_interval(site.gain(), score, signed=True)] if sites.alone else []
        rows.append(row)
    unit = f"{score.name} (%)" if score.share else score.name
    about = (
        f"{sites.group.label}: {unit} on each client's own test data, with 95 % intervals by the bootstrap "
        f"over its test samples.{sites.chosen}"
    )
    if sites.counted:
        about += (
            " They are from counts, as what models say of single samples is not stored; of two models the "
            "samples are drawn apart, so that intervals of gains are wide."
        )
    about += "" if sites.alone else " A run of separate beside it would show what training alone gives."
    heads = ["client", "test samples", *(MODELS[model] for model in models)]
    return Table("Is it worth it?", about, [*heads, *(["gain over alone"] if sites.alone else [])], rows)


def _thresholds(sites: Sites) -> Table | None:
    """Where a site of two classes says yes: chosen on its validation data, tried on its test data."""
    if not sites.classes:
        return None
    rows = []
    for site in sites.sites:
        own = site.test.by_model["own"]
        if own.shape[1] != 2 or site.validation is None:
            return None
        threshold = best_threshold(site.validation.truth, chances(site.validation.by_model["own"]))
        if threshold is None:
            rows.append([Entry(site.name, site.name), *[Entry("–", None)] * 3])
            continue
        says = chances(own) >= threshold
        parts = [(says[site.test.truth == 1]), ~says[site.test.truth == 0]]
        shares = [float(part.mean()) if len(part) else None for part in parts]
        entries = [Entry("–" if share is None else f"{100 * share:.1f}", share) for share in shares]
        rows.append([Entry(site.name, site.name), Entry(f"{threshold:.3f}", threshold), *entries])
    about = (
        f"{sites.group.label}, own models: the probability of the second class from which on a sample counts "
        "as one of it. It is chosen on the client's validation data, for the largest sum of sensitivity and "
        "specificity, and tried on its test data."
    )
    return Table("Thresholds", about, ["client", "threshold", "sensitivity (%)", "specificity (%)"], rows)


def chances(outputs: Floats) -> Floats:
    """The probability of the second of two classes."""
    return np.asarray(1 / (1 + np.exp(np.clip(outputs[:, 0] - outputs[:, 1], -500, 500))))


def best_threshold(truth: Floats, chance: Floats) -> float | None:
    """The middle between two probabilities where sensitivity + specificity is largest; the first of equals.

    None where there is one class alone.

    >>> best_threshold(np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.6, 0.9]))
    0.5
    """
    if len(np.unique(truth)) < 2:
        return None
    levels = np.unique(chance)
    middles = np.concatenate([[levels[0]], (levels[1:] + levels[:-1]) / 2])
    sums = [(chance[truth == 1] >= each).mean() + (chance[truth == 0] < each).mean() for each in middles]
    return float(middles[int(np.argmax(sums))])


def _subgroups(sites: Sites) -> Table | None:
    """Results apart by a column's values, for all clients together and for each."""
    if sites.by is None or any(site.test.group is None for site in sites.sites):
        return None
    score, rows = sites.sites[0].score, []
    for site in sites.sites:
        assert site.test.group is not None
        for value in np.unique(site.test.group):
            part = site.test.some(site.test.group == value)
            apart = Site(f"{site.name} {value}", part, None, score, site.seed)
            row = [Entry(site.name, site.name), Entry(str(value), str(value))]
            row += [Entry(str(part.count), float(part.count)), _with_interval(apart.value("own"), score)]
            if sites.alone:
                row += [_with_interval(apart.value("alone"), score)]
                row += [_with_interval(apart.gain(), score, signed=True)]
            rows.append(row)
    heads = ["client", sites.by, "test samples", "own model"]
    about = f"{sites.group.label}: each client's test samples apart by {sites.by}, with 95 % intervals."
    return Table(
        f"By {sites.by}",
        about,
        [*heads, *(["trained alone", "gain over alone"] if sites.alone else [])],
        rows,
    )


# Curves ---------------------------------------------------------------------------------------------------


def site_figures(sites: Sites) -> list[Figure]:
    """ROC curves of two classes, and how far confidence can be trusted, client by client."""
    if not sites.classes:
        return []
    shown = sites.sites[:MOST_CURVES]
    two = all(model.shape[1] == 2 for site in shown for model in site.test.by_model.values())
    made = [_figure(shown, "calibration", "How far confidence can be trusted", _reliability)]
    return [*([_figure(shown, "roc", "ROC curves", _roc)] if two else []), *made]


ABOUT = {
    "roc": "What share of the second class is found, against the share of the first that is taken for it, "
    "for every threshold, on the client's test data.",
    "calibration": "How often predictions are right, by how sure the model is, on the client's test data; on "
    "the diagonal they are right as often as they claim.",
}
AXES = {
    "roc": ("false positive rate", "true positive rate"),
    "calibration": ("confidence", "share that is right"),
}


def _figure(
    sites: Sequence[Site],
    name: str,
    title: str,
    curve: Callable[[Floats, Floats], tuple[Floats, Floats, str]],
) -> Figure:
    views: Views = {}
    for place, site in enumerate(sites):
        lines, words = [], []
        for number, (model, label) in enumerate(MODELS.items()):
            if model in site.test.by_model:
                x, y, told = curve(site.test.truth, site.test.by_model[model])
                lines += [Line(label, number, x.tolist(), y.tolist())] if len(x) else []
                words.append([label, told])
        lines.append(Line("diagonal", 7, [0.0, 1.0], [0.0, 1.0]))
        what = "area under the curve" if name == "roc" else "calibration error"
        sentence = f"{site.name}, {site.test.count} test samples; {what}: "
        sentence += ", ".join(f"{label} {told}" for label, told in words) + "."
        views[(str(place),)] = View(Lines(*AXES[name], lines), sentence, [["model", what], *words])
    options = {str(place): site.name for place, site in enumerate(sites)}
    return Figure(name, title, ABOUT[name], [Choice("client", "client", options)], views)


def _roc(truth: Floats, outputs: Floats) -> tuple[Floats, Floats, str]:
    chance = chances(outputs)
    order = np.argsort(-chance, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(chance[order])), len(order) - 1)  # ties are one step
    positive = (truth[order] == 1).astype(float)
    found, taken = np.cumsum(positive)[ends], np.cumsum(1 - positive)[ends]
    if not positive.any() or positive.all():
        return np.zeros(0), np.zeros(0), "– (one class)"
    x, y = np.append(0, taken / taken[-1]), np.append(0, found / found[-1])
    area = float(((x[1:] - x[:-1]) * (y[1:] + y[:-1]) / 2).sum())
    return x, y, f"{area:.3f}"


def _reliability(truth: Floats, outputs: Floats) -> tuple[Floats, Floats, str]:
    logits = outputs - outputs.max(1, keepdims=True)
    likely = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    sure, right = likely.max(1), (likely.argmax(1) == truth).astype(float)
    bins = np.clip(np.ceil(sure * BINS).astype(int) - 1, 0, BINS - 1)
    count = np.bincount(bins, minlength=BINS)
    there = count > 0
    x = np.bincount(bins, sure, BINS)[there] / count[there]
    y = np.bincount(bins, right, BINS)[there] / count[there]
    error = float((count[there] * np.abs(x - y)).sum() / count.sum())
    return x, y, f"{error:.3f}"
