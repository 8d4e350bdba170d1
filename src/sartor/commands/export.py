"""``sartor export`` and ``sartor predict``: a run's models in use."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sartor.commands.base import Imports, app, reported
from sartor.errors import SettingError

if TYPE_CHECKING:
    from sartor.runs.predictor import Predictor


class Format(StrEnum):
    """What a model is written as."""

    torch = "torch"
    onnx = "onnx"


Client = Annotated[
    str | None,
    typer.Option(
        help="Whose model: the client's own where the method gives one, else the shared one; left out: the "
        "shared one.",
        show_default=False,
    ),
]
State = Annotated[
    Path | None,
    typer.Option(
        help="A node's state folder in place of a run: what the node keeps, without any server.",
        show_default=False,
    ),
]


@app.command()
@reported
def export(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="The run folder.", show_default=False)
    ] = None,
    client: Client = None,
    state: State = None,
    format: Annotated[
        Format | None,
        typer.Option(
            help="PyTorch's program, or ONNX; left out: as the name to write ends, else PyTorch's.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write; left out: CLIENT.pt2 or CLIENT.onnx.", show_default=False),
    ] = None,
    imports: Imports = None,
) -> None:
    """Write a model to one file that needs no Sartor: network, preprocessing, label names and model card.

    sartor export runs/RUN --client Oslo --format onnx

    sartor export --state sartor-node/oslo
    """
    chosen = _predictor(run, state, client, imports)
    name = str(chosen.card["client"] or "shared").replace("/", "_")
    if out is None:
        out, format = Path(name), format or Format.torch
    path = chosen.save(out, None if format is None else format.value)
    print(f"model: {path}")
    print(f"model card: {path.with_suffix('.md')}")


@app.command()
@reported
def predict(
    model: Annotated[
        Path, typer.Argument(metavar="RUN|MODEL", help="A run folder, or a file of `sartor export`.")
    ],
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="New rows: a CSV or Parquet table, or an npz file with x.")
    ],
    client: Client = None,
    out: Annotated[
        Path, typer.Option(help="The file to write: .csv, .parquet, or .npz with the predictions alone.")
    ] = Path("scored.csv"),
    imports: Imports = None,
) -> None:
    """Predict new rows: the table with the predictions beside it, and probabilities where there are such.

    sartor predict runs/RUN new.csv --client Oslo --out scored.csv

    sartor predict Oslo.onnx new.csv
    """
    from sartor.runs.scoring import score

    if model.is_file():
        from sartor.runs.predictor import load_predictor

        if client is not None:
            raise SettingError(f"--client: {model} is the model of one client already; leave it out")
        chosen = load_predictor(model)
    else:
        chosen = _predictor(model, None, client, imports)
    count = score(chosen, table, out)
    print(f"{count} rows: {out}")


def _predictor(
    run: Path | None, state: Path | None, client: str | None, imports: list[str] | None
) -> Predictor:
    """The model of a run or of a node's state folder."""
    if (run is None) == (state is None):
        raise SettingError("give a run folder, or --state with a node's state folder")
    from sartor.commands.words import import_words

    import_words(imports)
    if run is not None:
        from sartor.runs.result import read_result

        return read_result(run).predictor(client)
    from sartor.remote.keeping import read_kept

    assert state is not None
    kept = read_kept(state)
    alone = kept.names[0] if client is None and len(kept.names) == 1 else client
    return kept.predictor(alone)
