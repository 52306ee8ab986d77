"""Follow a job to its end: events by long poll, then its status, then the steps that are new.

The status is read before the steps, so that an ended job's last step is never missed. A daemon that goes away is
waited for: systemd starts it again, and the job goes on by itself.
"""

import sys
import time
from collections.abc import Callable
from typing import Protocol

from rlhfd.cli.client import Daemon, Object
from rlhfd.cli.ending import INTERRUPTED, complain
from rlhfd.errors import NoDaemonError, RlhfdError

ENDED = frozenset({"done", "failed", "cancelled"})
POLL_SECONDS = 2.0  # also how often what it does now is asked for
PATIENCE_SECONDS = 180.0  # for a daemon that is being restarted
RETRY_SECONDS = 0.5


class View(Protocol):
    """What shows a followed job; see `views`."""

    def update(self, job: Object, events: list[Object], steps: list[Object], /) -> None:
        """Where the job stands now, and what is new: events and learned steps."""
        ...

    def ended(self, job: Object, steps: list[Object], /) -> None:
        """The job is done, failed or cancelled; `steps` are all of its metrics."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was; called once, whatever happened."""
        ...


def nothing_to_check() -> None:
    """For a daemon that is not ours."""


def follow(
    daemon: Daemon, job_id: int, view: View, *, check: Callable[[], None] = nothing_to_check
) -> tuple[Object, list[Object]]:
    """Show a job until it ends: its last status and all its steps.

    `check` is called while the daemon does not answer; it raises where waiting is useless. Raises NoDaemonError after
    PATIENCE_SECONDS without an answer.
    """
    event_id, steps = 0, list[Object]()
    silent_since: float | None = None
    while True:
        try:
            events: list[Object] = daemon.get(f"/jobs/{job_id}/events", after=event_id, wait=POLL_SECONDS)
            job: Object = daemon.get(f"/jobs/{job_id}")
            news: list[Object] = daemon.get(f"/jobs/{job_id}/metrics", after=steps[-1]["step"] if steps else 0)
        except NoDaemonError:
            check()
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > PATIENCE_SECONDS:
                raise
            time.sleep(RETRY_SECONDS)
            continue
        silent_since = None
        event_id = events[-1]["id"] if events else event_id
        steps += news
        view.update(job, events, news)
        if job["state"] in ENDED:
            return job, steps


def show(daemon: Daemon, job_id: int, *, as_json: bool, check: Callable[[], None] = nothing_to_check) -> Object:
    """Follow a job in the view that fits the output: its last status."""
    from rlhfd.cli.views import view_for

    view = view_for(as_json=as_json)
    try:
        job, steps = follow(daemon, job_id, view, check=check)
    finally:
        view.close()
    view.ended(job, steps)
    return job


def exit_status(job: Object) -> int:
    """The job's own: 0 done, 1 failed or cancelled, with its reason on stderr."""
    if job["state"] == "done":
        return 0
    reason = job["reason"] or "no reason was given"
    return complain(f"job {job['id']} ({job['name']}) {_verb(job['state'])}: {reason}", RlhfdError.exit_status)


def to_the_end(daemon: Daemon, job: Object, *, as_json: bool) -> int:
    """Follow a job of a daemon that goes on without us; Ctrl-C stops following, and only that."""
    try:
        return exit_status(show(daemon, job["id"], as_json=as_json))
    except KeyboardInterrupt:
        print(
            f"\nno longer following; job {job['id']} goes on.  rlhfd status {job['id']}   rlhfd cancel {job['id']}",
            file=sys.stderr,
        )
        return INTERRUPTED


def _verb(state: str) -> str:
    return "was cancelled" if state == "cancelled" else state
