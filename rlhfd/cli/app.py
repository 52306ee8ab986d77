"""The table of commands, for typer. Help is plain text: rich's would double the time that `--help` takes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhfd import __version__
from rlhfd.cli import audit, check, doctor, export, jobs, run, serve, show
from rlhfd.cli.client import Where
from rlhfd.cli.ending import INTERRUPTED, misused

COMMANDS: tuple[tuple[str, Callable[..., Any], str], ...] = (  # name, function, example
    ("run", run.run, "rlhfd run jobs/quickstart.toml"),
    ("check", check.check, "rlhfd check job.toml --set rollout.groups_per_step=16"),
    ("serve", serve.serve, "rlhfd serve --state-dir /var/lib/rlhfd"),
    ("submit", jobs.submit, "rlhfd submit job.toml --set learner.learning_rate=1e-5 --after 3"),
    ("ls", jobs.ls, "rlhfd ls --json"),
    ("status", jobs.status_command, "rlhfd status 3"),
    ("logs", show.logs, "rlhfd logs 3 --follow --worker learner"),
    ("samples", show.samples, "rlhfd samples 3 -n 8"),
    ("metrics", show.metrics, "rlhfd metrics 3 --csv > run3.csv"),
    ("events", show.events, "rlhfd events 3 --follow"),
    ("pause", jobs.pause, "rlhfd pause 3"),
    ("resume", jobs.resume, "rlhfd resume 3"),
    ("cancel", jobs.cancel, "rlhfd cancel 3"),
    ("retry", jobs.retry, "rlhfd retry 3"),
    ("export", export.export, "rlhfd export 3 --version 30 ./my-model"),
    ("audit", audit.audit, "rlhfd audit 3"),
    ("doctor", doctor.doctor, "rlhfd doctor"),
)

EXIT_STATUSES = (
    "Exit status: 0 done, 1 failed or cancelled, 64 usage or unknown id, 65 damaged or foreign state, 69 no daemon, "
    "74 I/O, 75 already running, 77 not permitted, 78 bad job file or anything it names, 130 Ctrl-C."
)

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

Socket = Annotated[Path | None, typer.Option(metavar="PATH", help="The daemon's socket; or RLHFD_SOCKET.")]
StateDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Where jobs are kept; or RLHFD_STATE_DIR.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the trace of an error.")]
Version = Annotated[bool, typer.Option("--version", help="Print the version.")]


@app.callback(invoke_without_command=True, epilog=EXIT_STATUSES)
def rlhfd(
    context: typer.Context,
    socket: Socket = None,
    state_dir: StateDir = None,
    debug: Debug = False,
    version: Version = False,
) -> None:
    """Post-train language models with reinforcement learning, through crashes, reboots and power cuts.

    Start with `rlhfd run jobs/quickstart.toml`. The options below may stand anywhere on the line.
    """
    del debug  # read before anything is parsed: see __main__
    context.obj = Where(socket=socket, state_dir=state_dir)
    if version:
        print(f"rlhfd {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


for _name, _function, _example in COMMANDS:
    app.command(_name, epilog=f"Example: {_example}")(_function)


def run_app(arguments: Sequence[str]) -> int:
    """Parse one line and run its command: the exit status. Wrong usage is one sentence and 64."""
    usage_error: Any = typer.BadParameter.__base__  # its class has no public name
    try:
        status = app(list(arguments), prog_name="rlhfd", standalone_mode=False)
    except usage_error as error:
        command = error.ctx.command_path if error.ctx else "rlhfd"
        return misused(error.format_message(), command)
    except typer.Abort:
        return INTERRUPTED
    return status if isinstance(status, int) else 0
