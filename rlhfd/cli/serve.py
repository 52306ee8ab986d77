"""`rlhfd serve`: the daemon in the foreground, as systemd runs it."""

import os
from pathlib import Path
from typing import Annotated

import typer

from rlhfd.cli.machine import refuse_platform
from rlhfd.cli.options import where
from rlhfd.core.places import server_socket, state_dir

Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Settings; default: /etc/rlhfd/config.toml, $XDG_CONFIG_HOME/rlhfd/config.toml."),
]


def serve(context: typer.Context, config: Config = None) -> int:
    """Run the daemon until SIGTERM.

    Jobs that were running before go on by themselves. SIGTERM writes checkpoints and ends with status 0.
    """
    refuse_platform()
    from rlhfd import daemon
    from rlhfd.config import load_settings

    place = where(context)
    settings = load_settings(os.environ, config)
    state = state_dir(os.environ, given=place.state_dir, configured=settings.state_dir)
    socket = server_socket(
        os.environ, given=place.socket, configured=settings.socket, state_given=place.state_dir, state=state
    )
    return daemon.main(settings, state, socket)
