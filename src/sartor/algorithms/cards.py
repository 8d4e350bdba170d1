"""What can be said of every method before it runs: a card each, to choose, filter and sort by.

A card is read off the method's class: what its author declared, and what follows from it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from sartor.algorithms.base import Algorithm, registered
from sartor.errors import SettingError
from sartor.privacy.settings import MODES as MODES_OF_PRIVACY
from sartor.settings import meaning, unknown

MODELS = ("shared", "personal", "both")
TERM = re.compile(r"([+−]?)\s*([^+−]+)")
FACTORS = re.compile(r"(\d*)\s*(\w?)")


@dataclass(frozen=True)
class Card:
    """One method."""

    name: str
    summary: str
    family: str
    year: int | None
    """When it was published; None where its paper does not say."""
    paper: str
    server_keeps: str
    client_keeps: str
    traffic: str
    sent: float | None
    """Models that cross per participating client and round, both ways, with default settings; parts and
    statistics count a half, and None is where it grows with the number of clients."""
    models: str
    """What it gives: one model or several that are shared, a personal one for every client, or both."""
    asynchronous: bool
    """Whether its rounds are what arrives in time, rather than everyone who was asked."""
    needs_validation: bool
    """Whether clients must have validation data."""
    sums_only: bool
    """Whether the server needs nothing of the replies but weighted sums, as secure aggregation gives them."""
    private: tuple[str, ...]
    """The modes of ``[privacy]`` with which it has a guarantee."""

    @property
    def stateless(self) -> bool:
        """Whether a client keeps nothing between rounds."""
        return self.client_keeps == "nothing"


def card(name: str) -> Card:
    """The card of one method.

    >>> card("fedavg").models, card("fedavg").sent, card("fedavg").year
    ('shared', 2.0, 2017)
    """
    cls = registered()[name]
    said = re.search(r"\b(?:19|20)\d\d\b", cls.paper)
    return Card(
        name,
        (inspect.getdoc(cls) or "").partition("\n")[0],
        cls.family,
        cls.year or (int(said[0]) if said else None),
        cls.paper,
        cls.server_keeps,
        cls.client_keeps,
        cls.traffic,
        _models_sent(cls),
        _models_given(cls),
        _dispatches(cls),
        cls.needs_validation,
        cls.sums_only,
        tuple(mode for mode in MODES_OF_PRIVACY if why_unprotected(cls, mode) is None),
    )


def why_unprotected(cls: type[Algorithm[Any, Any]], mode: str) -> str | None:
    """Why a method has no guarantee under a mode of ``[privacy]``; None where it has one.

    >>> why_unprotected(registered()["spfl"], "central")
    'its server needs more of the replies than their sum'
    """
    for refused, why in cls.unprotected:
        if refused == mode:
            return why
    if not cls.deployable:
        return "it has the data of all clients in one place"
    if mode == "central" and not cls.sums_only:
        return "its server needs more of the replies than their sum"
    if mode == "central" and _dispatches(cls):
        return "its clients answer when they are done, and are no cohort that was drawn"
    return None


def cards(
    *,
    family: str | None = None,
    years: tuple[int | None, int | None] = (None, None),
    models: str | None = None,
    stateless: bool | None = None,
    asynchronous: bool | None = None,
    needs_validation: bool | None = None,
    sums_only: bool | None = None,
    private: str | None = None,
    sort: str = "name",
) -> list[Card]:
    """The cards of all methods that fit, sorted by one of their fields; what is None does not matter.

    ``family`` may be part of a family's name. ``models`` is "shared", "personal" or "both"; methods that give
    both are among the shared and among the personal ones. ``years`` are the first and the last. ``private``
    is a mode of ``[privacy]``.

    >>> [found.name for found in cards(models="personal", sums_only=True, years=(2019, 2019), sort="sent")]
    ['fedper', 'fedupdate']
    """
    if models is not None and models not in MODELS:
        raise unknown("models", models, MODELS, what="name")
    if private is not None and private not in MODES_OF_PRIVACY:
        raise unknown("private", private, MODES_OF_PRIVACY, what="name")
    known = [field.name for field in fields(Card)]
    if sort not in known:
        raise unknown("sort", sort, known, what="name")
    wanted = {
        "stateless": stateless,
        "asynchronous": asynchronous,
        "needs_validation": needs_validation,
        "sums_only": sums_only,
    }
    found = [
        one
        for one in map(card, sorted(registered()))
        if (family is None or family in one.family)
        and (models is None or one.models in (models, "both"))
        and (private is None or private in one.private)
        and _within(one.year, years)
        and all(value is None or getattr(one, key) is value for key, value in wanted.items())
    ]
    return sorted(found, key=lambda one: (getattr(one, sort) is None, getattr(one, sort) or 0, one.name))


def _within(year: int | None, years: tuple[int | None, int | None]) -> bool:
    """Whether a year lies between two; one that is not known only where none is asked for."""
    first, last = years
    if first is None and last is None:
        return True
    return year is not None and (first is None or year >= first) and (last is None or year <= last)


def _own_functions(cls: type[Algorithm[Any, Any]]) -> Iterable[Any]:
    """The functions of a method's class and of those it extends."""
    for base in cls.__mro__:
        if issubclass(base, Algorithm) and base is not Algorithm:
            yield from (value for value in vars(base).values() if inspect.isfunction(value))


def _dispatches(cls: type[Algorithm[Any, Any]]) -> bool:
    return any("dispatch" in function.__code__.co_names for function in _own_functions(cls))


def _models_given(cls: type[Algorithm[Any, Any]]) -> str:
    """A method that has no shared model, or may have none, says so by the return type of ``shared``."""
    own = cls.shared is not Algorithm.shared
    shared = not (own and "None" in str(inspect.signature(cls.shared).return_annotation))
    given = str(inspect.signature(cls.personalize).return_annotation)
    if cls.personalize is Algorithm.personalize or given == "None":
        return "shared"
    return "both" if shared else "personal"


def _models_sent(cls: type[Algorithm[Any, Any]]) -> float | None:
    """The models of ``traffic``, both ways; a letter is the setting with that symbol."""
    symbols = {meaning(field).symbol: field.default for field in fields(cls.Hyper)}
    total = 0.0
    for side in re.split(r"[,;(]", cls.traffic)[0].split("/"):
        for sign, term in TERM.findall(side):
            known = FACTORS.fullmatch(term.strip())
            number, letter = known.groups() if known is not None else ("", "")
            factor = symbols.get(letter) if letter else 1.0
            if not isinstance(factor, (int, float)):
                return None
            amount = 0.5 if known is None else float(number or 1) * factor
            total += -amount if sign == "−" else amount
    return total


def years_of(text: str) -> tuple[int | None, int | None]:
    """``2020``, ``2019-2021``, ``2020-`` or ``-2018`` as the first and the last year.

    >>> years_of("2019-2021"), years_of("2020-"), years_of("2020")
    ((2019, 2021), (2020, None), (2020, 2020))
    """
    first, dash, last = text.strip().partition("-")
    try:
        ends = int(first) if first else None, int(last) if last else None
    except ValueError:
        raise SettingError(f"--year {text}: expected a year or a span, as in 2020 or 2019-2021") from None
    return ends if dash else (ends[0], ends[0])
