"""Where things are: state directory, sockets, cache. Pure functions of the environment; light, for `rlhfd status`.

Precedence: what the command line gave > RLHFD_* > the settings file > the service manager's directories > XDG's.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from rlhfd.errors import UsageError

SOCKET_NAME = "rlhfd.sock"
SYSTEM_SOCKET = Path("/run/rlhfd/rlhfd.sock")
SOCKET_PATH_LIMIT = 107  # bytes of sun_path, without its final zero

Environment: TypeAlias = Mapping[str, str]


def state_dir(environ: Environment, *, given: Path | None = None, configured: str | None = None) -> Path:
    """The daemon's: --state-dir, RLHFD_STATE_DIR, the settings, STATE_DIRECTORY, $XDG_STATE_HOME/rlhfd."""
    explicit = given or _path(environ, "RLHFD_STATE_DIR") or (Path(configured) if configured else None)
    chosen = explicit or _path(environ, "STATE_DIRECTORY") or _xdg(environ, "XDG_STATE_HOME", ".local/state")
    return _absolute(environ, chosen)


def cache_dir(environ: Environment) -> Path:
    """Converted and downloaded models: CACHE_DIRECTORY, else $XDG_CACHE_HOME/rlhfd."""
    return _absolute(environ, _path(environ, "CACHE_DIRECTORY") or _xdg(environ, "XDG_CACHE_HOME", ".cache"))


def server_socket(
    environ: Environment,
    *,
    given: Path | None = None,
    configured: str | None = None,
    state_given: Path | None = None,
    state: Path,
) -> Path:
    """Where the daemon listens. `state`: its state directory; `state_given`: --state-dir, if there was one.

    Raises UsageError for a path that is too long for a unix socket.
    """
    explicit = given or _path(environ, "RLHFD_SOCKET") or (Path(configured) if configured else None)
    if explicit is None and (state_given or environ.get("RLHFD_STATE_DIR")):
        explicit = state / SOCKET_NAME
    runtime = _path(environ, "RUNTIME_DIRECTORY") or _runtime(environ) or state
    return _fitting(_absolute(environ, explicit or runtime / SOCKET_NAME))


def client_sockets(environ: Environment, *, given: Path | None = None, state_given: Path | None = None) -> list[Path]:
    """Where a client looks, in this order: the one that was named, or all the usual places."""
    named = given or _path(environ, "RLHFD_SOCKET")
    if named is None and (state_given or environ.get("RLHFD_STATE_DIR")):
        named = state_dir(environ, given=state_given) / SOCKET_NAME
    if named is not None:
        return [_fitting(_absolute(environ, named))]
    usual = [
        runtime / SOCKET_NAME if (runtime := _runtime(environ)) else None,
        SYSTEM_SOCKET,
        _xdg(environ, "XDG_STATE_HOME", ".local/state") / SOCKET_NAME,  # where there is no runtime directory
    ]
    return [path for path in usual if path is not None]


def _path(environ: Environment, name: str) -> Path | None:
    """The variable as a path; the first one where a service manager lists several."""
    first = environ.get(name, "").partition(":")[0]
    return Path(first) if first else None


def _runtime(environ: Environment) -> Path | None:
    base = _path(environ, "XDG_RUNTIME_DIR")
    return None if base is None else base / "rlhfd"


def _xdg(environ: Environment, name: str, fallback: str) -> Path:
    """An XDG directory of ours; as XDG wants it, a relative one counts as unset."""
    base = environ.get(name, "")
    root = Path(base) if base.startswith("/") else Path(environ.get("HOME") or "/") / fallback
    return root / "rlhfd"


def _absolute(environ: Environment, path: Path) -> Path:
    parts = path.parts
    if parts and parts[0] == "~":
        path = Path(environ.get("HOME") or "/").joinpath(*parts[1:])
    return Path(os.path.abspath(path))  # noqa: PTH100  # resolve() would follow links, which may be remade later


def _fitting(path: Path) -> Path:
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        raise UsageError(
            f"the socket's path {path} is longer than the {SOCKET_PATH_LIMIT} bytes that a unix socket takes: "
            "give a shorter one with --socket or RLHFD_SOCKET"
        )
    return path
