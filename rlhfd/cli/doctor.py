"""`rlhfd doctor`: what would stop a job on this machine; the daemon adds what only it can see."""

import os

import typer

from rlhfd.cli.client import Object, Where, find
from rlhfd.cli.machine import local_checks, refuse_platform
from rlhfd.cli.options import AsJson, where
from rlhfd.cli.printing import print_json, print_table
from rlhfd.errors import NoDaemonError, NotPermittedError, RlhfdError


def doctor(context: typer.Context, as_json: AsJson = False) -> int:
    """Show what would stop a job on this machine.

    Checks Python, libraries, SQLite, disk, devices and the daemon's socket. Needs no daemon. The exit status is 1 if
    anything would stop a job.
    """
    place = where(context)
    checks = [*local_checks(place), *_of_the_daemon(place)]
    if as_json:
        print_json(checks)
    else:
        print_table(["", "CHECK", "FOUND", "DO"], map(_row, checks), left=frozenset({"", "CHECK", "FOUND", "DO"}))
    refuse_platform()
    return 0 if all(check["ok"] for check in checks) else RlhfdError.exit_status


def _of_the_daemon(place: Where) -> list[Object]:
    """Whether one answers, and its own checks if so."""
    looked_at = ", ".join(map(str, place.sockets(os.environ)))
    try:
        daemon = find(place)
        detail = f"{daemon.path} answers, process {daemon.get('/ping')['pid']}"
        return [_socket(ok=True, detail=detail), *daemon.get("/doctor")]
    except NoDaemonError:
        return [_socket(ok=True, detail=f"no daemon on {looked_at}", fix="rlhfd serve, or rlhfd run JOB.toml")]
    except NotPermittedError as error:
        return [_socket(ok=False, detail=str(error), fix="ask for membership of that group")]


def _socket(*, ok: bool, detail: str, fix: str = "") -> Object:
    return {"check": "socket", "ok": ok, "detail": detail, "fix": fix}


def _row(check: Object) -> list[str]:
    return ["ok" if check["ok"] else "NO", check["check"], check["detail"], check["fix"]]
