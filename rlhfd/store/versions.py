"""Policy versions: an id names exact weights and is never reused; a step is what staleness is counted in."""

import sqlite3
from collections.abc import Sequence

import msgspec

from rlhfd.core.types import JobId, Version, VersionId, VersionState, VersionStep
from rlhfd.errors import StateError
from rlhfd.store import events
from rlhfd.store.db import Database
from rlhfd.store.moves import guard, json_text, refused
from rlhfd.store.queries import query

_NEWEST = query("newest_version")
_PUBLISH = query("publish")


async def latest_trained(db: Database, job_id: JobId) -> Version:
    """The version that the next step starts from: the newest that is not lost; at first the start model's."""
    found = await _newest(db, job_id, [VersionState.TRAINED, VersionState.PUBLISHED])
    if found is None:
        raise StateError(f"job {job_id} has no version at all, not even its start model's")
    return found


async def latest_published(db: Database, job_id: JobId) -> Version | None:
    """The newest version that an engine has run; None before the first start."""
    return await _newest(db, job_id, [VersionState.PUBLISHED])


async def _newest(db: Database, job_id: JobId, states: Sequence[VersionState]) -> Version | None:
    values = {"job_id": job_id, "states": json_text(list(states))}
    row = await db.read(lambda connection: connection.execute(_NEWEST, values).fetchone())
    return None if row is None else version_of(row)


async def publish(db: Database, version_id: VersionId) -> Version:
    """The engine runs these weights and has been checked (invariants 5 and 6); again after every engine start.

    Guard: state, and no newer version of the job is published, for versions at the generator never go back. Raises
    StateError. The event is told once.
    """
    now = db.now_us()

    def mark(connection: sqlite3.Connection) -> Version:
        before = connection.execute("SELECT state FROM policy_version WHERE id = ?", (version_id,)).fetchone()
        row = connection.execute(_PUBLISH, {**guard(VersionState, "publish"), "id": version_id}).fetchone()
        if row is None:
            raise refused(connection, VersionState, version_id, "publish")
        if before["state"] != row["state"]:
            events.insert(connection, row["job_id"], "published", {"version": row["step"]}, now)
        return version_of(row)

    return await db.write(mark, urgent=True)


async def version(db: Database, version_id: VersionId) -> Version:
    """One version as it is now. Raises StateError for an id that is not there."""
    return await db.read(lambda connection: fetch_version(connection, version_id))


async def steps_by_id(db: Database, job_id: JobId) -> dict[VersionId, VersionStep]:
    """The step of every version of a job, lost ones too: chunks keep the id of the weights that sampled them."""
    sql = "SELECT id, step FROM policy_version WHERE job_id = ?"

    def steps(connection: sqlite3.Connection) -> dict[VersionId, VersionStep]:
        return {VersionId(row["id"]): VersionStep(row["step"]) for row in connection.execute(sql, (job_id,))}

    return await db.read(steps)


def fetch_version(connection: sqlite3.Connection, version_id: int) -> Version:
    """One version, inside a transaction. Raises StateError for an id that is not there."""
    row = connection.execute("SELECT * FROM policy_version WHERE id = ?", (version_id,)).fetchone()
    if row is None:
        raise StateError(f"no version {version_id}")
    return version_of(row)


def version_of(row: sqlite3.Row) -> Version:
    """A row of `policy_version`."""
    return Version(
        id=VersionId(row["id"]),
        step=VersionStep(row["step"]),
        state=VersionState(row["state"]),
        parent_id=None if row["parent_id"] is None else VersionId(row["parent_id"]),
        fingerprint=None if row["fingerprint"] is None else msgspec.json.decode(row["fingerprint"]),
    )
