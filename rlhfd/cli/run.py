"""`rlhfd run`: one command from a job file to its end, with the live daemon or with one of its own."""

import shlex
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

import typer

from rlhfd.cli import follow, own, submission
from rlhfd.cli.client import Daemon, Object, find
from rlhfd.cli.ending import INTERRUPTED
from rlhfd.cli.jobs import told
from rlhfd.cli.options import Again, AsJson, JobFile, Sets, where
from rlhfd.cli.submission import Submission
from rlhfd.errors import NoDaemonError

WAKES = {"failed": "retry", "paused": "resume"}  # what `run` asks for where the job is there already


def run(
    context: typer.Context, job_file: JobFile, *, sets: Sets = None, again: Again = False, as_json: AsJson = False
) -> int:
    """Run a job to its end, here and now.

    Uses the live daemon if one answers, else starts one of its own and stops it at the end. A job of the same content
    and name goes on where it was; one that failed or is paused is started again. Ctrl-C: an own daemon writes a
    checkpoint and stops, a live one goes on; the exit status is 130. Otherwise the exit status is the job's.

    With --json: one metrics object a line, then the job's status.
    """
    job = submission.read(job_file, sets or [])
    place = where(context)
    try:
        daemon = find(place)
    except NoDaemonError:
        with _signals_interrupt():
            return _with_own(own.start(place), job, again=again, as_json=as_json)
    return follow.to_the_end(daemon, _begin(daemon, job, again=again), as_json=as_json)


def _with_own(daemon: own.OwnDaemon, job: Submission, *, again: bool, as_json: bool) -> int:
    """Submit, follow, stop. The daemon is stopped whatever happens."""
    try:
        asked = daemon.wait_ready()
        begun = _begin(asked, job, again=again)
        if daemon.lost_the_race:
            return follow.to_the_end(asked, begun, as_json=as_json)
        ended = follow.show(asked, begun["id"], as_json=as_json, check=daemon.check)
    except KeyboardInterrupt:
        return _interrupted(daemon)
    except BaseException:
        daemon.stop()
        raise
    daemon.stop()
    return follow.exit_status(ended)


def _begin(daemon: Daemon, job: Submission, *, again: bool) -> Object:
    """The job, submitted or found, and started again where it had stopped."""
    made = submission.send(daemon, job, again=again)
    print(told(made), file=sys.stderr)
    verb = WAKES.get(made["state"])
    return made if made["created"] or verb is None else daemon.post(f"/jobs/{made['id']}/{verb}")


def _interrupted(daemon: own.OwnDaemon) -> int:
    print("\nstopping: the job's state is being written; Ctrl-C again leaves it to do so alone", file=sys.stderr)
    try:
        daemon.stop()
    except KeyboardInterrupt:
        print(f"the daemon (process {daemon.process.pid}) goes on stopping", file=sys.stderr)
    print(f"go on with:  {the_line_that_goes_on(sys.argv[1:])}", file=sys.stderr)
    return INTERRUPTED


def the_line_that_goes_on(argv: list[str]) -> str:
    """The same line; without --again, which would make yet another job."""
    return shlex.join(["rlhfd", *(word for word in argv if word != "--again")])


@contextmanager
def _signals_interrupt() -> Generator[None]:
    """SIGTERM and SIGHUP do what Ctrl-C does: the own daemon must not be left behind unknown."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's alone
        yield
        return
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
