"""The tables and figures of the papers, a TOML file each, which :mod:`sartor.studies.entries` reads.

A file says:

==================  ==================================================================================
title, paper        what is shown, and whose it is
place               where it stands there, such as ``Table IV``
note                what a reader of the numbers has to know
same_as             the entry that holds its numbers, for a figure that draws a table
over, axis          for a figure of curves what its axis has: ``rounds`` (a curve each), ``columns`` or
                    ``methods`` (the numbers at the end of their labels or titles), ``clients``; and what
                    it is called
cannot              why there is nothing to run; such an entry has none of the following
preset, experiment  the paper's setting: a preset, and settings that win over it
cell, score, when   what is taken from a run: ``local`` (the personal model's own test data, the shared
                    model's where there is none), a cell of the evaluation, ``observed``, or ``computed``
                    (no training: :mod:`sartor.studies.computed`, whose settings ``experiment`` then has);
                    the score in it; ``last`` or ``best`` (the best on test data so far)
percent             whether numbers are in percent
seeds               how many runs the paper averages; 0 where it does not say
columns             the columns: ``label``, and what is special in it: ``settings``, ``hyper`` by method,
                    ``methods`` (settings by method), ``round`` (the state after it), ``cell``, ``score``
methods             the rows: ``algorithm``, ``title`` (as printed), ``hyper``, ``settings``
source              ``printed``, ``stated`` (in the paper's text, about a figure), ``drawn`` (not in figures),
                    ``ours`` (nobody else has such numbers)
tuning              hyper-parameters chosen on validation data before the runs: ``every`` (values by name),
                    ``methods`` (others for some methods, as many), ``seeds`` of the trials
values, deviations  the paper's numbers by method, one per column; ``nan`` where there is none
small               the small setting: ``preset``, ``experiment``, ``hyper`` by method, ``columns`` with
                    ``paper`` (the paper's column whose order of methods is compared), ``methods``
measured            our numbers by scale: ``date``, ``hardware``, ``seeds``, ``command``, ``values`` and
                    ``deviations`` by method, one per column of the scale, ``code`` (a hash of its source)
==================  ==================================================================================
"""

from __future__ import annotations

from pathlib import Path

from sartor.settings import unknown

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of all entries, ``paper/table``, paper by paper in the order of the print.

    >>> [name for name in names() if name.startswith("comfed/")]
    ['comfed/fig1', 'comfed/fig2', 'comfed/table4']
    """
    found = [file.stem.replace("-", "/", 1) for file in _FOLDER.glob("*.toml")]
    return sorted(found, key=lambda name: (name.rstrip("0123456789"), len(name), name))


def path(name: str) -> Path:
    """The file of an entry."""
    if name not in names():
        raise unknown("table or figure", name, names(), what="name")
    return _FOLDER / f"{name.replace('/', '-', 1)}.toml"
