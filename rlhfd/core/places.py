"""Where things are: the state directory and the sockets, from the environment and the command line alone.

A state directory that is given by name brings its own socket, so that several daemons can live on one machine; the
usual one listens in the runtime directory.
"""

from collections.abc import Mapping
from pathlib import Path

SOCKET = "rlhfd.sock"
SYSTEM_SOCKET = Path("/run/rlhfd") / SOCKET


def state_dir(environ: Mapping[str, str], override: str | Path | None = None) -> Path:
    """--state-dir or RLHFD_STATE_DIR, else systemd's STATE_DIRECTORY, else $XDG_STATE_HOME/rlhfd."""
    given = _given_state_dir(environ, override)
    if given is not None:
        return given
    if listed := environ.get("STATE_DIRECTORY"):
        return Path(listed.partition(":")[0])  # systemd lists several with colons
    home = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME", "/")) / ".local/state"
    return Path(home) / "rlhfd"


def socket_path(
    environ: Mapping[str, str], override: str | Path | None = None, state_override: str | Path | None = None
) -> Path:
    """Where a daemon listens; `override` is --socket, `state_override` --state-dir."""
    if named := override or environ.get("RLHFD_SOCKET"):
        return Path(named).absolute()
    given = _given_state_dir(environ, state_override)
    if given is None:
        if listed := environ.get("RUNTIME_DIRECTORY"):
            return Path(listed.partition(":")[0]) / SOCKET
        if runtime := environ.get("XDG_RUNTIME_DIR"):
            return Path(runtime) / "rlhfd" / SOCKET
    return (given or state_dir(environ)) / SOCKET


def client_sockets(
    environ: Mapping[str, str], override: str | Path | None = None, state_override: str | Path | None = None
) -> list[Path]:
    """Where a client looks, in order; the first that answers is taken."""
    if named := override or environ.get("RLHFD_SOCKET"):
        return [Path(named).absolute()]
    given = _given_state_dir(environ, state_override)
    if given is not None:
        return [given / SOCKET]
    runtime = environ.get("XDG_RUNTIME_DIR")
    mine = [Path(runtime) / "rlhfd" / SOCKET] if runtime else []
    return [*mine, SYSTEM_SOCKET, state_dir(environ) / SOCKET]


def _given_state_dir(environ: Mapping[str, str], override: str | Path | None) -> Path | None:
    named = override or environ.get("RLHFD_STATE_DIR")
    return Path(named).absolute() if named else None
