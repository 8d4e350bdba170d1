"""What an experiment may say of its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sartor.data.labels import check_labels
from sartor.errors import DataError, SettingError
from sartor.extensions import function_file
from sartor.settings import setting

OWN_DATA = "own"
"""The name of data that was given in Python: a stored experiment can name it, but not load it."""

COLUMN_KEYS = ("client_column", "label_column", "split_column", "feature_columns", "text_column")
"""Settings of an own table without a schema."""
TEXT_KEYS = ("tokens", "length", "vocabulary")
"""Settings of a text in such a table."""


@dataclass(frozen=True)
class Data:
    """Where the samples come from and how many clients share them."""

    name: str = setting("digits", "the data set; `sartor data NAME` shows it")
    clients: int = setting(20, "number of clients", low=1)
    folder: str | None = setting(None, "folder that holds downloaded data; left out: the user's cache folder")
    path: str | None = setting(
        None,
        "own data instead of `name`: a folder of npz files, a table, LEAF's JSON, or a function, as in "
        "mine.py:load",
    )
    client_column: str | None = setting(
        None, "column of an own table that names the client; left out: a partition divides its rows"
    )
    label_column: str | None = setting(None, "column of an own table that holds the label")
    split_column: str | None = setting(
        None, "column of an own table that says train, test or validation; left out: splits are drawn"
    )
    feature_columns: tuple[str, ...] | None = setting(
        None, "columns of an own table that are features, all of them numbers; left out: all others"
    )
    text_column: str | None = setting(
        None, "column of an own table that holds a text, whose tokens are the sample"
    )
    tokens: str = setting(
        "words", "what a text is cut into: words, characters, hashed (words), or a function, mine.py:tokens"
    )
    length: int = setting(64, "tokens of a text; a longer one is cut, a shorter one padded", low=1)
    vocabulary: int = setting(10_000, "most tokens that are told apart, padding and unknown ones too", low=3)
    labels: tuple[str, ...] | None = setting(
        None, "all classes in order, where labels are texts; left out: those that occur, alphabetically"
    )
    validation: float = setting(
        0.0, "share of each client's training data kept for validation", low=0, high=0.5
    )
    normalise: bool = setting(
        True, "whether inputs are scaled to mean 0 and deviation 1 on the training data"
    )

    def __post_init__(self) -> None:
        """Tokens of a text, and labels that can name classes."""
        for key in () if self.text_column else TEXT_KEYS:
            if getattr(self, key) != Data.__dataclass_fields__[key].default:
                raise SettingError(f"data.{key}: of no text; give data.text_column too")
        if self.labels is not None:
            if not self.labels:
                raise SettingError("data.labels: names no class; leave it out, or name all of them")
            try:
                check_labels(self.labels)
            except DataError as error:
                raise SettingError(f"data.labels: {error}") from None


@dataclass(frozen=True)
class Public:
    """Samples without labels that the server and all clients know, for methods that learn from such."""

    name: str | None = setting(None, "the public data set; its training samples are taken, without labels")
    path: str | None = setting(
        None, "own public data instead of `name`: a function, as in mine.py:load, that gives a Source"
    )
    count: int = setting(0, "how many of its samples, drawn by the seed; 0: all", low=0)
    normalise: bool = setting(True, "whether they are scaled to mean 0 and deviation 1, by themselves")

    @property
    def wanted(self) -> bool:
        """Whether there are any."""
        return self.name is not None or self.path is not None

    def __post_init__(self) -> None:
        """One source at most, and none of a file's."""
        if self.name is not None and self.path is not None:
            raise SettingError("public.name: the samples are those of public.path; give one of them")
        if self.path is not None and function_file(self.path) is None:
            raise SettingError(
                f"public.path = {self.path!r}: expected a function in a file, as in mine.py:load"
            )
        if self.count and not self.wanted:
            raise SettingError("public.count: of no samples; give public.name or public.path too")


@dataclass(frozen=True)
class Expect:
    """What the data must be, so that no client or node that has others can take part; by default anything."""

    shape: tuple[int, ...] | None = setting(None, "sizes of a sample, as in [1, 28, 28]", low=1)
    classes: int | None = setting(None, "number of classes", low=1)
    names: tuple[str, ...] | None = setting(None, "the names of all clients")
    samples: int | None = setting(None, "most training samples of a client", low=1)
    low: float | None = setting(None, "smallest value in a sample, before it is normalised")
    high: float | None = setting(None, "largest value in a sample, before it is normalised")

    @property
    def bounded(self) -> bool:
        """Whether it is said between which values samples lie."""
        return self.low is not None and self.high is not None

    def __post_init__(self) -> None:
        """Values between which there are some."""
        if self.low is not None and self.high is not None and self.low > self.high:
            raise SettingError(f"expect.low = {self.low:g}: above expect.high = {self.high:g}")


@dataclass(frozen=True, kw_only=True)
class PartitionChoice:
    """How the samples are dealt to the clients: a scheme by name with its settings, or a stored partition."""

    name: str = setting("dirichlet", "the partition scheme")
    settings: Any
    file: str | None = setting(None, "a stored partition (npz) to reuse; the scheme is then not used")
    test_share: float | None = setting(
        None,
        "training and test set are one, and this share of a client's samples is to test on; left out: "
        "they are apart",
        above=0,
        below=1,
    )
    leaf: str | None = setting(
        None, "the leaf whose numbers stand for labels, as in x.site or y.kind; left out: the target"
    )


@dataclass(frozen=True, kw_only=True)
class FeaturesChoice:
    """What is computed from the raw inputs before training, by name with its settings."""

    name: str = setting("none", "the features computed from the inputs")
    settings: Any
