"""``sartor search``: hyper-parameters chosen on validation data, with equal budgets for all methods."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sartor.commands.base import (
    AsJson,
    Clients,
    DataName,
    Device,
    EngineName,
    Imports,
    Rounds,
    Seed,
    app,
    print_table,
    reported,
    text,
)
from sartor.commands.compare import (
    Algorithms,
    Arguments,
    Seeds,
    Together,
    parse_seeds,
    show,
)
from sartor.commands.words import common_flags, read_method_words
from sartor.errors import SartorError

if TYPE_CHECKING:
    from sartor.studies.tuning import Search


@app.command()
@reported
def search(
    arguments: Arguments = None,
    algorithms: Algorithms = None,
    budget: Annotated[
        int | None, typer.Option(help="Trials of every method.  [default: 8]", show_default=False)
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="random or grid.  [default: random]", show_default=False)
    ] = None,
    seeds: Seeds = None,
    together: Together = None,
    data: DataName = None,
    clients: Clients = None,
    rounds: Rounds = None,
    seed: Seed = None,
    engine: EngineName = None,
    device: Device = None,
    imports: Imports = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the runs, where earlier ones are found; left out: one in searches/.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose hyper-parameters on validation data, with the same number of trials for every method.

    A method whose space is not given is searched over the declared ranges of its numbers.

    sartor search experiment.toml --algorithms fedprox,ditto --budget 8

    sartor search --algorithms fedavg data.validation=0.2 fedavg.lr=[0.01,0.1] --method grid
    """
    flags = common_flags(data, clients, rounds, seed, engine, device)
    experiment = read_method_words(arguments or (), imports, flags, section="search", algorithms=algorithms)
    from sartor.runs.record import to_json
    from sartor.studies import tuning  # after the words are known to be right: it imports torch

    result = tuning.search(
        algorithms,
        experiment=experiment,
        budget=budget,
        method=method,
        seeds=parse_seeds(seeds, experiment.get("search"), seed),
        together=together,
        out=out,
        progress=True,
    )
    if as_json:
        print(to_json(result.to_mapping()))
    else:
        _print_search(result)
        print(f"trials: {result.out / tuning.FILE}")
        print(f"compare the chosen ones with: sartor compare {result.out / tuning.CHOSEN}")
    for tuned in result.methods:
        if tuned.chosen is None:
            raise SartorError(f"{tuned.label}: all trials failed; the first: {tuned.trials[0].failed}")


def _print_search(result: Search) -> None:
    """Every trial, the chosen one marked."""
    from sartor.runs.metrics import is_share

    factor, digits = (100.0, 2) if is_share(result.score) else (1.0, 4)
    rows = []
    for tuned in result.methods:
        for trial in tuned.trials:
            values = ", ".join(f"{key}={text(value)}" for key, value in trial.hyper.items())
            note = "chosen" if trial.number == tuned.chosen else "failed" if trial.failed else ""
            score = show(trial.validation, factor, digits)
            rows.append((tuned.label, str(trial.number + 1), values, score, trial.cell or "-", note))
    unit = " in percent" if is_share(result.score) else ""
    heads = ("method", "trial", "hyper-parameters", f"validation {result.score}{unit}", "of", "")
    print_table(heads, rows)
