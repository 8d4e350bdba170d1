"""What all commands share: the app, how mistakes are told, how words and tables are handled.

Results go to standard output, progress and messages to standard error. A mistake in the input is one message
and exit status 2; an error in the program keeps its traceback. Everything heavy is imported inside the
commands, so help comes at once.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeVar

import typer

from sartor.errors import SartorError

Command = TypeVar("Command", bound=Callable[..., None])

app = typer.Typer(
    name="sartor",
    help="Federated learning when clients differ: every client gets a model cut to its own data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
DataName = Annotated[str | None, typer.Option(help="Data set (data.name).", show_default=False)]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds (rounds).", show_default=False)]
EngineName = Annotated[
    str | None, typer.Option(help="auto, loop or stacked (engine.name).", show_default=False)
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda (engine.device).", show_default=False)]
Clients = Annotated[int | None, typer.Option(help="Number of clients (data.clients).", show_default=False)]
Seed = Annotated[int | None, typer.Option(help="The seed (seed).", show_default=False)]


def reported(command: Command) -> Command:
    """Let a command end in one message where the user can mend it: a mistake (2) or an interruption (130)."""

    @functools.wraps(command)
    def reporting(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except SartorError as error:
            if not getattr(error, "told", False):
                print(f"sartor: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt as stop:
            if os.environ.get("RANK", "0") == "0":
                print(f"sartor: {str(stop) or 'stopped'}", file=sys.stderr)
            raise typer.Exit(130) from None

    return reporting  # type: ignore[return-value]


def sort_out(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """The arguments without and with an equals sign: names and files, and ``key=value``."""
    words: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        is_override = "=" in argument and not os.path.isfile(argument)
        (overrides if is_override else words).append(argument)
    return words, overrides


def text(value: Any) -> str:
    """A value for a table cell."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on standard output; in a pipe wide enough that lines stay whole."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*heads, box=box.SIMPLE, show_header=any(heads), pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 200)
    console.print(table)
