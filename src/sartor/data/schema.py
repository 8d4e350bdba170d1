"""What the columns of a table are: the schema that an experiment has under ``[columns]``.

A column has a kind, and settings that say how it becomes numbers. What is learned from data for that (what
fills a gap, by what it is scaled, which categories there are) is a setting too: where it is left out the
clients agree on it (:mod:`sartor.data.statistics`), and the run's own ``config.toml`` has what they agreed
on, so that whoever reads a table by it later prepares it in the same way and learns nothing.

>>> columns = read_columns({"age": {"missing": "mean"}, "sex": "category", "ill": "label"})
>>> [column.kind for column in columns], columns[0].wanted
(['number', 'category', 'label'], {'sums'})
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sartor.data.labels import check_labels
from sartor.errors import DataError, SettingError
from sartor.settings import build, setting, shown

NUMBERS = ("number", "date")
TEXTS = ("category", "ordinal")
FEATURES = (*NUMBERS, *TEXTS, "text")
"""Kinds of columns that a model sees."""
ROLES = ("label", "client", "split", "weight")
"""Kinds of columns of which there is one at most."""
MISSING = {
    "number": ("refuse", "mean", "median"),
    "date": ("refuse", "mean", "median"),
    "category": ("refuse", "most frequent", "place"),
    "ordinal": ("refuse", "most frequent"),
    "text": ("refuse", "place"),
}
MOST_COLUMNS, LONGEST_NAME = 2**14, 200
PARTS = ("month", "weekday", "hour")
LEARNED = ("values", "fill", "centre", "spread", "quantiles")
"""Settings that are learned where they are left out."""
_SCALED = ("missing", "indicator", "scale", "low", "high", "fill", "centre", "spread", "quantiles")
_CODED = ("missing", "indicator", "codes", "values", "fill")
SETTINGS = {
    "number": _SCALED,
    "date": (*_SCALED, "parts", "since", "format"),
    "category": (*_CODED, "code", "least"),
    "ordinal": _CODED,
    "text": ("missing", "indicator", "size"),
}
"""What can be said of a column of each kind."""


@dataclass(frozen=True)
class Column:
    """One column of a table, by name."""

    name: str
    kind: str = setting(
        "number", "what the column is; out: it is left out, as an id is", choices=(*FEATURES, "out", *ROLES)
    )
    missing: str = setting(
        "refuse",
        "what fills a gap: mean, median for numbers and dates; most frequent for categories and ordinals; "
        "place: that of unknown categories, or no words; refuse: a gap is an error",
        choices=("refuse", "mean", "median", "most frequent", "place"),
    )
    indicator: bool = setting(False, "whether a feature of its own says that the value is missing")
    scale: str = setting(
        "standard",
        "how a number is scaled: by mean and deviation, by median and quartiles (robust), to its rank in "
        "0..1 (quantile), or not",
        choices=("standard", "robust", "quantile", "none"),
    )
    low: float | None = setting(
        None, "lower end of the grid on which values are counted; in what is learned, less counts as this"
    )
    high: float | None = setting(None, "upper end of that grid; in what is learned, more counts as this")
    code: str = setting(
        "one-hot",
        "what a category becomes: a feature for each value and one for unknown ones, or its number, 0 for "
        "unknown ones, for an embedding",
        choices=("one-hot", "index"),
    )
    codes: dict[str, str] = dataclasses.field(
        default_factory=dict,
        metadata=setting(None, "other words for a value, as in {male = 'm', 1 = 'm'}").metadata,
    )
    least: int = setting(1, "rows of a category that a client has at least, or it does not tell of it", low=1)
    parts: tuple[str, ...] = setting(
        (), "parts of a date that are features too, as points of a circle", choices=PARTS
    )
    since: str | None = setting(None, "a date is counted in days from this column's; left out: from 1970")
    format: str | None = setting(None, "how dates are written, as in %d.%m.%Y; left out: 2026-11-16 08:30")
    size: int = setting(64, "features of a text, to which its words are hashed", low=1, high=2**16)
    values: tuple[str, ...] | None = setting(
        None, "all categories; of an ordinal in order, and needed; left out: agreed on"
    )
    fill: float | str | None = setting(None, "what fills a gap; left out: agreed on")
    centre: float | None = setting(None, "what is subtracted; left out: agreed on")
    spread: float | None = setting(None, "what is divided by; left out: agreed on", above=0)
    quantiles: tuple[float, ...] | None = setting(None, "equally likely values; left out: agreed on")

    def __post_init__(self) -> None:
        """Settings that belong to the kind, and go together."""
        allowed = SETTINGS.get(self.kind, ())
        for field in dataclasses.fields(self)[2:]:
            given = getattr(self, field.name)
            default = {} if field.name == "codes" else field.default
            if given != default and field.name not in allowed:
                raise SettingError(f"{self.place}.{field.name}: not for a column of kind {self.kind}")
        if self.kind in MISSING and self.missing not in MISSING[self.kind]:
            raise SettingError(
                f"{self.place}.missing: must be one of {', '.join(MISSING[self.kind])} for a column of kind "
                f"{self.kind}, got {shown(self.missing)}"
            )
        self._check_values()
        self._check_grid()

    def _check_values(self) -> None:
        if self.kind == "ordinal" and not self.values:
            raise SettingError(f"{self.place}.values: missing; give the values of an ordinal in order")
        try:
            check_labels(self.values or ())
        except DataError as error:
            raise SettingError(f"{self.place}.values: {error}") from None
        if self.fill is not None and isinstance(self.fill, str) != (self.kind in TEXTS):
            kind = "a text" if self.kind in TEXTS else "a number"
            raise SettingError(f"{self.place}.fill: expected {kind}, got {shown(self.fill)}")

    def _check_grid(self) -> None:
        if (self.low is None) != (self.high is None) or (
            self.low is not None and self.high is not None and self.low >= self.high
        ):
            raise SettingError(f"{self.place}: give low and high, low below high")
        if self.low is None and "grid" in self.wanted:
            raise SettingError(
                f"{self.place}: quantiles are counted on a grid, which low and high are the ends of; give "
                "both, or take mean and standard"
            )
        ranks = self.quantiles
        if ranks is not None and (len(ranks) < 2 or list(ranks) != sorted(ranks)):
            raise SettingError(f"{self.place}.quantiles: expected two or more numbers in ascending order")

    @property
    def place(self) -> str:
        """Where the experiment has it."""
        return f"columns.{self.name}"

    @property
    def wanted(self) -> set[str]:
        """What clients must tell so that all is known: ``sums``, counts on a ``grid`` or of ``values``."""
        asked = set()
        if self.kind in NUMBERS:
            centred = self.centre is not None and self.spread is not None
            fills = {"mean": "sums", "median": "grid"} if self.fill is None else {}
            scales = {} if centred else {"standard": "sums", "robust": "grid"}
            scales |= {"quantile": "grid"} if self.quantiles is None else {}
            asked = {fills.get(self.missing), scales.get(self.scale)} - {None}
        elif self.kind in TEXTS:
            frequent = self.missing == "most frequent" and self.fill is None
            asked = {"values"} if self.values is None or frequent else set()
        return {str(word) for word in asked}

    def to_mapping(self) -> dict[str, Any]:
        """What differs from a column of which nothing is said, and the kind."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:]}
        defaults = {field.name: field.default for field in dataclasses.fields(self)} | {"codes": {}}
        return {key: value for key, value in values.items() if key == "kind" or value != defaults[key]}


def read_columns(given: Any) -> tuple[Column, ...]:
    """The columns of a table of settings, by name; whether they go together."""
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise SettingError(
            f"columns: expected a table, got {shown(given)}; write [columns] and a line for each"
        )
    if len(given) > MOST_COLUMNS:
        raise SettingError(f"columns: {len(given)} of them, at most {MOST_COLUMNS}")
    made = tuple(_column(name, settings) for name, settings in given.items())
    if not made:
        return ()
    for role in ROLES:
        found = [column.name for column in made if column.kind == role]
        if len(found) > 1:
            raise SettingError(f"columns: two are of kind {role}, {found[0]} and {found[1]}; one can be")
    if not features(made):
        raise SettingError(f"columns: none is a feature; give one of the kinds {', '.join(FEATURES)}")
    dates = {column.name for column in made if column.kind == "date"}
    for column in made:
        if column.since is not None and column.since not in dates - {column.name}:
            raise SettingError(f"{column.place}.since: {shown(column.since)} is no other column of kind date")
    return made


def _column(name: Any, settings: Any) -> Column:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        raise SettingError(f"columns: the name {shown(name)} is not printable; rename the column")
    if isinstance(settings, str):
        settings = {"kind": settings}
    if not isinstance(settings, Mapping):
        raise SettingError(
            f"columns.{name}: expected a table, got {shown(settings)}; write {{kind = 'number'}}, say"
        )
    if "name" in settings:
        raise SettingError(f"columns.{name}.name: the name is the key; leave it out")
    known = {key: value for key, value in settings.items() if value is not None}
    return build(Column, {**known, "name": name}, f"columns.{name}")


def features(columns: Sequence[Column]) -> list[Column]:
    """The columns that a model sees, by name: so the order of a table, or of its schema, decides nothing."""
    return sorted((column for column in columns if column.kind in FEATURES), key=lambda column: column.name)


def role(columns: Sequence[Column], kind: str) -> str | None:
    """The name of the column of a kind of which there is one at most."""
    return next((column.name for column in columns if column.kind == kind), None)


def numbered(columns: Sequence[Column]) -> list[Column]:
    """The columns whose categories are numbers for an embedding."""
    return [column for column in features(columns) if column.kind == "category" and column.code == "index"]


def feature_names(columns: Sequence[Column]) -> list[str]:
    """The features that are numbers, in order, of columns of which all is known.

    >>> feature_names(read_columns({"sex": {"kind": "category", "values": ["f", "m"], "indicator": True}}))
    ['sex = f', 'sex = m', 'sex unknown', 'sex missing']
    """
    names: list[str] = []
    for column in features(columns):
        if column.kind in NUMBERS:
            names += [column.name]
            names += [f"{column.name} {part} {way}" for part in column.parts for way in ("sin", "cos")]
        elif column.kind == "ordinal":
            names += [column.name]
        elif column.kind == "text":
            names += [f"{column.name} word {place}" for place in range(column.size)]
        elif column.code == "one-hot":
            names += [f"{column.name} = {value}" for value in column.values or ()] + [
                f"{column.name} unknown"
            ]
        names += [f"{column.name} missing"] * column.indicator
    return names


def columns_mapping(columns: Sequence[Column]) -> dict[str, Any]:
    """Columns as :func:`read_columns` reads them."""
    return {column.name: column.to_mapping() for column in columns}


def settles(columns: Sequence[Column], learned: Sequence[Column]) -> bool:
    """Whether columns are others of which what was left open, and nothing else, has been settled."""
    after = {column.name: column for column in learned}
    if after.keys() != {column.name for column in columns} or any(column.wanted for column in learned):
        return False
    for before in columns:
        unsaid: dict[str, Any] = {key: None for key in LEARNED if getattr(before, key) is None}
        if replace(after[before.name], **unsaid) != before:
            return False
    return True


def known(column: Column, **learned: Any) -> Column:
    """The column with what was learned, where it does not say so itself."""
    return replace(column, **{key: value for key, value in learned.items() if getattr(column, key) is None})
