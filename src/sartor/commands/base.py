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
from typer.core import TyperGroup

from sartor.errors import SartorError
from sartor.settings import nearest

Command = TypeVar("Command", bound=Callable[..., None])


class Commands(TyperGroup):
    """The commands; one that is not known is told once what it may have meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of the first word."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            known = sorted(self.list_commands(ctx))
            guess = nearest(args[0], known)
            hint = f"Did you mean {guess!r}?" if guess else f"There are {', '.join(known)}."
            ctx.fail(f"No such command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="sartor",
    cls=Commands,
    help="Federated learning when clients differ: every client gets a model cut to its own data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
DataName = Annotated[
    str | None, typer.Option(help="Data set (data.name), or your own (data.path).", show_default=False)
]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds (rounds).", show_default=False)]
EngineName = Annotated[
    str | None, typer.Option(help="auto, loop or stacked (engine.name).", show_default=False)
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda (engine.device).", show_default=False)]
Clients = Annotated[int | None, typer.Option(help="Number of clients (data.clients).", show_default=False)]
Seed = Annotated[int | None, typer.Option(help="The seed (seed).", show_default=False)]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="FILE.py|MODULE",
        help="Import code of your own first, which registers what it has; may be repeated.",
        show_default=False,
    ),
]


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
        except BrokenPipeError:  # whoever read the output has enough
            raise
        except OSError as error:  # a path that is too long, a folder that may not be read: as the system says
            place = f"{error.filename}: " if error.filename else ""
            print(f"sartor: {SartorError(f'{place}{error.strerror or error}')}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt as stop:
            if os.environ.get("RANK", "0") == "0":
                print(f"sartor: {str(stop) or 'stopped'}", file=sys.stderr)
            raise typer.Exit(130) from None

    return reporting  # type: ignore[return-value]


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
