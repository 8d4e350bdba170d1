"""``sartor compare``: several methods over several seeds, as tables of numbers and of paired statistics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
)
from sartor.commands.words import common_flags, read_method_words
from sartor.errors import SartorError, SettingError

if TYPE_CHECKING:
    from sartor.studies.comparison import Comparison, Estimate, RankingResult

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[EXPERIMENT.toml|PRESET] [KEY=VALUE]...",
        help="An experiment file or a preset; settings that win over it; METHOD.KEY=VALUE for one method.",
        show_default=False,
    ),
]
Algorithms = Annotated[
    str | None,
    typer.Option(help="The methods, as in fedavg,ditto; left out: the file's.", show_default=False),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        help="A number of seeds, or a list such as 0,1,5; `3,` is seed 3 alone.", show_default=False
    ),
]
Together = Annotated[
    str | None,
    typer.Option(
        help="Train the seeds in one batch: yes, no or auto (where faster).  [default: auto]",
        show_default=False,
    ),
]


@app.command()
@reported
def compare(
    arguments: Arguments = None,
    algorithms: Algorithms = None,
    seeds: Seeds = None,
    target: Annotated[
        float | None,
        typer.Option(help="Score to reach: shows rounds, bytes and seconds to it.", show_default=False),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Test the methods against this one, not all pairs.", show_default=False)
    ] = None,
    references: Annotated[
        bool | None,
        typer.Option(
            "--references/--no-references",
            help="Whether separate and fedupdate are compared too.  [default: references]",
            show_default=False,
        ),
    ] = None,
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
            help="Folder of the runs, where earlier ones are found; left out: one in comparisons/.",
            show_default=False,
        ),
    ] = None,
    as_latex: Annotated[bool, typer.Option("--latex", help="Print a LaTeX table, for paper.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, for a spreadsheet.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare methods on the same clients, cohorts and batches, over several seeds.

    sartor compare --algorithms fedavg,fedprox --seeds 3 --rounds 20 fedprox.mu=0.1

    sartor compare experiment.toml --target 0.9

    sartor compare experiment.toml --latex > table.tex
    """
    forms = {"json": as_json, "latex": as_latex, "csv": as_csv, "markdown": as_markdown}
    form = [name for name, wanted in forms.items() if wanted]
    if len(form) > 1:
        raise SettingError(f"--{form[0]} and --{form[1]}: give one of them")
    flags = common_flags(data, clients, rounds, seed, engine, device)
    experiment = read_method_words(
        arguments or (), imports, flags, section="compare", algorithms=algorithms, references=references
    )
    from sartor.runs.record import to_json
    from sartor.studies import comparison  # after the words are known to be right: it imports torch

    result = comparison.compare(
        algorithms,
        experiment=experiment,
        seeds=parse_seeds(seeds, experiment.get("compare"), seed),
        target=target,
        against=against,
        references=references,
        together=together,
        out=out,
        progress=True,
    )
    if as_json:
        print(to_json(result.to_mapping()))
    elif form:
        from sartor.studies.formats import FORMATS

        print(FORMATS[form[0]](result), end="")
    else:
        _print_comparison(result)
        print(f"comparison: {result.out / comparison.FILE}")
    if result.failed:
        first = result.failed[0]
        left_out = ", ".join(dict.fromkeys(failure.label for failure in result.failed))
        raise SartorError(
            f"left out, as runs failed: {left_out}; the first, {first.label} with seed {first.seed}: "
            f"{first.message}"
        )


def parse_seeds(given: str | None, stored: Any = None, seed: int | None = None) -> int | list[int] | None:
    """``5`` as a number of seeds, ``1,2,5`` as a list of them; beside a list, ``--seed`` has no meaning."""
    wanted = stored.get("seeds") if given is None and isinstance(stored, dict) else _seeds(given)
    if seed is not None and isinstance(wanted, list):
        raise SettingError(
            f"--seed {seed}: the seeds are the list {','.join(map(str, wanted))}; give one of the two"
        )
    return None if given is None else wanted


def _seeds(given: str | None) -> int | list[int] | None:
    if given is None:
        return None
    try:
        seeds = [int(part) for part in given.removesuffix(",").split(",")]
    except ValueError:
        raise SettingError(
            f"--seeds: expected how many, or a list such as 0,1,5 (of seed 5 alone: 5,), got {given!r}"
        ) from None
    return seeds if "," in given else seeds[0]


def show(estimate: Estimate | None, factor: float = 1.0, digits: int = 1) -> str:
    """Mean and deviation for a table cell."""
    if estimate is None or estimate.mean is None:
        return "-"
    shown = f"{factor * estimate.mean:.{digits}f}"
    if estimate.deviation is None:
        return shown
    return f"{shown} ± {factor * estimate.deviation:.{digits}f}"


def _print_comparison(result: Comparison) -> None:
    """Scores, costs, pairs and ranks, a table each."""
    from sartor.runs.metrics import is_share

    percent = is_share(result.score)
    factor, digits = (100.0, 1) if percent else (1.0, 4)
    cells = [cell for cell in _cells() if any(cell in method.cells for method in result.methods)]
    validated = any(method.best_by_validation for method in result.methods)
    heads = ["method", result.score, "of", *cells, "client std", "worst decile"]
    rows = []
    for method in result.methods:
        row = [method.label, show(method.cells[method.main], factor, digits), method.main]
        row += [show(method.cells.get(cell), factor, digits) for cell in cells]
        row += [show(each, factor, digits) for each in (method.client_deviation, method.worst_decile)]
        if validated:
            row.append(show(method.best_by_validation.get(method.main), factor, digits))
        rows.append(row)
    print_table([*heads, *(["best by validation"] if validated else [])], rows)
    seeds = f"{len(result.seeds)} seed" + ("s" if len(result.seeds) > 1 else "")
    unit = "in percent, " if percent else ""
    print(f"{result.score} {unit}mean ± standard deviation over {seeds}, after the last round;")
    print("client std and worst decile: over clients, of the main number.\n")
    _print_costs(result)
    if result.pairs:
        _print_pairs(result, factor, digits)
    if result.ranking is not None:
        print("\n".join(ranking_lines(result.ranking)))
    runs = [run for method in result.methods for run in method.runs]
    reused = [run.folder for run in runs if run.reused]
    if reused:
        print(f"\nreused {len(reused)} of {len(runs)} runs: {', '.join(reused)}")
    print()


def _cells() -> tuple[str, ...]:
    from sartor.runs.evaluation import CELLS

    return CELLS


def _print_costs(result: Comparison) -> None:
    heads = ["method", "MB sent", "seconds"]
    if result.target is not None:
        heads += [f"rounds to {result.target:g}", f"MB to {result.target:g}", f"seconds to {result.target:g}"]
        heads += ["seeds there"]
    rows = []
    for method in result.methods:
        row = [method.label, show(method.bytes, 1e-6, 2), show(method.seconds, digits=1)]
        if method.to_target is not None:
            there = method.to_target
            row += [show(there.rounds), show(there.bytes, 1e-6, 2), show(there.seconds, digits=2)]
            row += [f"{there.reached} of {len(result.seeds)}"]
        rows.append(row)
    print_table(heads, rows)


def _print_pairs(result: Comparison, factor: float, digits: int) -> None:
    heads = ["first", "second", "difference", "95 % interval", "better / equal / worse", "seeds better"]
    heads += ["rank biserial", "p", "p (Holm)"]
    rows = [
        [
            pair.first,
            pair.second,
            f"{factor * pair.mean_difference:+.{digits}f}",
            f"{factor * pair.interval[0]:+.{digits}f} to {factor * pair.interval[1]:+.{digits}f}",
            f"{pair.better} / {pair.equal} / {pair.worse}",
            f"{pair.seeds_better} of {len(result.seeds)}",
            f"{pair.rank_biserial:+.2f}",
            f"{pair.p:.2g}",
            f"{pair.p_holm:.2g}",
        ]
        for pair in result.pairs
    ]
    print_table(heads, rows)
    print("first minus second over clients × seeds, positive in favour of the first; Wilcoxon signed-rank.\n")


def ranking_lines(ranking: RankingResult) -> list[str]:
    """The critical-difference view: methods by average rank, bars through those that cannot be told apart."""
    width = max(map(len, ranking.methods))
    lines = [
        f"average ranks over {ranking.blocks} clients × seeds (1 is best); Friedman p = {ranking.p:.2g}; "
        f"critical difference {ranking.critical_difference:.2f} (Nemenyi, 0.05)"
    ]
    for method, rank in zip(ranking.methods, ranking.ranks, strict=True):
        bars = "".join(" |" if method in clique else "  " for clique in ranking.cliques)
        lines.append(f"  {rank:5.2f}  {method:<{width}} {bars}".rstrip())
    if ranking.cliques:
        lines.append("methods that share a bar cannot be told apart")
    return lines
