"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from rlhfd.cli.client import Daemon, Where, find

JobId: TypeAlias = Annotated[int, typer.Argument(metavar="ID", min=1, help="The job's number, as `rlhfd ls` shows it.")]
JobFile: TypeAlias = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys, and nothing else.")]
Sets: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, as learner.learning_rate=1e-5; may be repeated."),
]
Again: TypeAlias = Annotated[
    bool, typer.Option("--again", help="Make a new job even if one of the same content and name exists.")
]
After: TypeAlias = Annotated[
    int | None, typer.Option("--after", metavar="ID", min=1, help="Start only when that job is done.")
]
Priority: TypeAlias = Annotated[int, typer.Option(metavar="N", help="Higher goes first; default 0.")]


def where(context: typer.Context) -> Where:
    """The daemon's place, as this line names it."""
    found: Where = context.obj
    return found


def daemon(context: typer.Context) -> Daemon:
    """The daemon that answers. Raises NoDaemonError."""
    return find(where(context))
