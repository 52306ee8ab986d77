"""Jobs: submitted once by their key, claimed by one epoch, moved only along core/lifecycle.py."""

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from rlhfd.core import lifecycle
from rlhfd.core.types import Desired, Epoch, Job, JobId, JobState, VersionState
from rlhfd.errors import UnknownJobError, UsageError
from rlhfd.store import events
from rlhfd.store.db import Database
from rlhfd.store.moves import guard, json_text, refused
from rlhfd.store.queries import query

T = TypeVar("T")

_INSERT = query("insert_job")
_QUEUE = query("queue")
_CLAIM = query("claim")
_MOVE = query("move_job")
_DEPENDENTS = query("dependents")
_INSERT_VERSION = query("insert_version")
_LOST = frozenset({JobState.FAILED, JobState.CANCELLED})


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What a submit stores. `spec`: the resolved job, `facts`: what the inspection found, both plain data."""

    submit_key: str
    name: str
    spec: Mapping[str, Any]
    spec_sha: str
    facts: Mapping[str, Any]
    max_steps: int
    priority: int = 0
    after: JobId | None = None


async def submit(db: Database, submission: Submission, *, again: bool = False) -> tuple[Job, bool]:
    """The job of this submission, and whether it was created now.

    Rule "submit", one transaction: job, its version 0 (the start model), event. Guard: the submit key; a known one
    gives the job that has it, and nothing is written. `again` gives the key a suffix instead. Raises UsageError for
    an `after` that is unknown, failed or cancelled.
    """
    now = db.now_us()

    def insert(connection: sqlite3.Connection) -> tuple[Job, bool]:
        known = connection.execute("SELECT * FROM job WHERE submit_key = ?", (submission.submit_key,)).fetchone()
        if known is not None and not again:
            return _job(known), False
        _check_after(connection, submission.after)
        key = submission.submit_key if known is None else _suffixed(connection, submission.submit_key)
        job = _insert(connection, replace(submission, submit_key=key), now)
        events.insert(connection, job.id, "submitted", {"name": job.name, "priority": job.priority}, now)
        return job, True

    return await db.write(insert, urgent=True)


async def by_key(db: Database, submit_key: str) -> Job | None:
    """The job that was submitted under this key, if any."""
    sql = "SELECT * FROM job WHERE submit_key = ?"
    row = await db.read(lambda connection: connection.execute(sql, (submit_key,)).fetchone())
    return None if row is None else _job(row)


def _check_after(connection: sqlite3.Connection, after: JobId | None) -> None:
    if after is None:
        return
    row = connection.execute("SELECT state FROM job WHERE id = ?", (after,)).fetchone()
    if row is None:
        raise UnknownJobError(f"no job has the id {after} that this one shall follow")
    if JobState(row["state"]) in _LOST:
        raise UsageError(f"job {after} is {row['state']}, so nothing can follow it: retry it first")


def _suffixed(connection: sqlite3.Connection, key: str) -> str:
    """`key#2`, `key#3` …: one more than there are."""
    sql = "SELECT count(*) FROM job WHERE submit_key = ? OR substr(submit_key, 1, ?) = ?"
    count = connection.execute(sql, (key, len(key) + 1, f"{key}#")).fetchone()[0]
    return f"{key}#{count + 1}"


def _insert(connection: sqlite3.Connection, new: Submission, now: int) -> Job:
    values = {
        "submit_key": new.submit_key,
        "name": new.name,
        "spec": json_text(new.spec),
        "spec_sha": new.spec_sha,
        "facts": json_text(new.facts),
        "state": lifecycle.INITIAL[JobState],
        "priority": new.priority,
        "after_id": new.after,
        "max_steps": new.max_steps,
        "now": now,
    }
    job = _job(connection.execute(_INSERT, values).fetchone())
    start = {"job_id": job.id, "parent_id": None, "step": 0, "state": lifecycle.INITIAL[VersionState]}
    connection.execute(_INSERT_VERSION, {**start, "fingerprint": None, "now": now}).fetchall()
    return job


async def job(db: Database, job_id: JobId) -> Job:
    """One job. Raises UnknownJobError."""
    return await db.read(lambda connection: fetch(connection, job_id))


def fetch(connection: sqlite3.Connection, job_id: JobId) -> Job:
    """One job, inside a transaction. Raises UnknownJobError."""
    row = connection.execute("SELECT * FROM job WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise UnknownJobError(f"no job has the id {job_id}")
    return _job(row)


async def jobs(db: Database) -> tuple[Job, ...]:
    """Every job, oldest first."""
    return await db.read(lambda connection: tuple(map(_job, connection.execute("SELECT * FROM job ORDER BY id"))))


async def queue(db: Database, epoch: Epoch) -> tuple[Job, ...]:
    """What may be claimed, in order: running jobs of older epochs, then by priority, then first come first served.

    Only jobs that their owners want to run and whose `after` is done.
    """
    return await db.read(lambda connection: tuple(map(_job, connection.execute(_QUEUE, {"epoch": epoch}))))


async def claim(db: Database, job_id: JobId, epoch: Epoch) -> Job | None:
    """The job, now running and ours; None if it was not to be had.

    Rule "claim": queued, or running under an older epoch -> running, owner epoch, attempt + 1. Guard: compare and
    set; row count 1 or stop. Idle attempts count up here and go back to 0 with the next applied step.
    """
    now = db.now_us()

    def take(connection: sqlite3.Connection) -> Job | None:
        values = {**guard(JobState, "claim"), "id": job_id, "epoch": epoch, "now": now}
        row = connection.execute(_CLAIM, values).fetchone()
        if row is None:
            return None
        events.insert(connection, job_id, "claimed", {"attempt": row["attempt"], "step": row["step"]}, now)
        return _job(row)

    return await db.write(take, urgent=True)


async def set_desired(db: Database, job_id: JobId, desired: Desired) -> Job:
    """What the owner asked for last; the pipeline acts on it. Guard: twice is once. Raises UnknownJobError."""
    return await _set(db, job_id, "desired", str(desired))


async def set_reason(db: Database, job_id: JobId, reason: str) -> Job:
    """What a queued job waits for, in words, with an event. Raises UnknownJobError."""
    now = db.now_us()

    def waits(connection: sqlite3.Connection) -> Job:
        connection.execute("UPDATE job SET reason = ?, updated_us = ? WHERE id = ?", (reason, now, job_id))
        job = fetch(connection, job_id)
        events.insert(connection, job_id, "waiting", {"reason": reason}, now)
        return job

    return await db.write(waits, urgent=True)


async def set_noise(db: Database, job_id: JobId, noise: float) -> Job:
    """Mean |engine - reference| of the start model's canary log-probs (invariant 6). Raises UnknownJobError."""
    return await _set(db, job_id, "noise", noise)


async def _set(db: Database, job_id: JobId, column: str, value: str | float) -> Job:
    now = db.now_us()

    def update(connection: sqlite3.Connection) -> Job:
        sql = f"UPDATE job SET {column} = ?, updated_us = ? WHERE id = ?"  # noqa: S608
        connection.execute(sql, (value, now, job_id))
        return fetch(connection, job_id)

    return await db.write(update, vital=True)


async def pause(db: Database, job_id: JobId, reason: str) -> Job:
    """Queued, running -> paused."""
    return await _move(db, job_id, "pause", reason)


async def cancel(db: Database, job_id: JobId, reason: str) -> Job:
    """Queued, running, paused -> cancelled, and with it what was to follow."""
    return await _move(db, job_id, "cancel", reason)


async def fail(db: Database, job_id: JobId, reason: str) -> Job:
    """Queued, running -> failed, and with it what was to follow."""
    return await _move(db, job_id, "fail", reason)


async def finish(db: Database, job_id: JobId) -> Job:
    """Running -> done."""
    return await _move(db, job_id, "finish", None)


async def requeue(db: Database, job_id: JobId) -> Job:
    """Paused (resume), failed, cancelled (retry) -> queued; its owner wants it to run, its attempts count from 0."""
    return await _move(db, job_id, "requeue", None)


async def _move(db: Database, job_id: JobId, event: str, reason: str | None) -> Job:
    """The job in its new state. One transaction: state, reason, no owner any more, an event, the dependents.

    Guard: compare and set. Raises UsageError, and changes nothing, where the job is in another state; UnknownJobError.
    """
    now = db.now_us()

    def change(connection: sqlite3.Connection) -> Job:
        values = {**guard(JobState, event), "id": job_id, "reason": reason, "now": now}
        row = connection.execute(_MOVE, values).fetchone()
        if row is None:
            raise refused(connection, JobState, job_id, event)
        events.insert(connection, job_id, "state", {"state": row["state"], "reason": reason}, now)
        if JobState(row["state"]) in _LOST:
            _cancel_dependents(connection, job_id, now)
        return _job(row)

    return await db.write(change, vital=True)


async def cancel_dependents(db: Database, job_id: JobId) -> tuple[JobId, ...]:
    """Cancel every waiting job that was to follow this one, directly or not. Re-runnable; `fail` and `cancel` do it."""
    now = db.now_us()
    return await db.write(lambda connection: _cancel_dependents(connection, job_id, now), vital=True)


def _cancel_dependents(connection: sqlite3.Connection, job_id: JobId, now: int) -> tuple[JobId, ...]:
    waiting = json_text([JobState.QUEUED, JobState.PAUSED])  # one that runs has seen the other done
    rows = connection.execute(_DEPENDENTS, {"id": job_id, "sources": waiting}).fetchall()
    for row in rows:
        cause = fetch(connection, JobId(row["cause"]))
        reason = f"job {cause.id}, which it was to follow, is {cause.state}"
        values = {"to": lifecycle.target(JobState, "cancel"), "sources": waiting, "id": row["id"], "reason": reason}
        connection.execute(_MOVE, {**values, "now": now}).fetchall()
        events.insert(connection, row["id"], "state", {"state": JobState.CANCELLED, "reason": reason}, now)
    return tuple(JobId(row["id"]) for row in rows)


def _job(row: sqlite3.Row) -> Job:
    return Job(
        id=JobId(row["id"]),
        name=row["name"],
        spec=msgspec.json.decode(row["spec"]),
        facts=msgspec.json.decode(row["facts"]),
        state=JobState(row["state"]),
        desired=Desired(row["desired"]),
        priority=row["priority"],
        after_id=_optional(JobId, row["after_id"]),
        owner_epoch=_optional(Epoch, row["owner_epoch"]),
        attempt=row["attempt"],
        idle_attempts=row["idle_attempts"],
        step=row["step"],
        max_steps=row["max_steps"],
        noise=row["noise"],
        reason=row["reason"],
        created_us=row["created_us"],
        updated_us=row["updated_us"],
    )


def _optional(kind: Callable[[int], T], value: int | None) -> T | None:
    return None if value is None else kind(value)
