"""Checkpoints, as rows, and what they allow to be deleted.

Files are durable before their row is committed, and gone before their row is: `begin` -> files -> `commit`, and
`prune` (deleting) -> files removed -> `forget`. Rollouts are collected once every kept checkpoint covers their step.
"""

import sqlite3
from collections.abc import Sequence

from rlhfd.core import lifecycle
from rlhfd.core.types import Checkpoint, CheckpointId, CheckpointState, JobId, VersionId, VersionStep
from rlhfd.errors import StateError
from rlhfd.store import events
from rlhfd.store.db import Database
from rlhfd.store.moves import guard, refused
from rlhfd.store.queries import query

_INSERT = query("insert_checkpoint")
_ALL = query("checkpoints")
_VALID = query("valid_checkpoints")
_COMMIT = query("commit_checkpoint")
_MOVE = query("move_checkpoint")
_COLLECTABLE = query("collectable_groups")
_COUNT_TOKENS = query("collected_tokens")
_DELETE_CHUNKS = query("delete_chunks")
_DELETE_USES = query("delete_step_rollouts")
SLICE = 8  # groups in one transaction of the collection: others shall not wait long behind it


async def begin(db: Database, job_id: JobId, version_id: VersionId, directory: str) -> Checkpoint:
    """The row of a checkpoint about to be written; the one that is there where it is being, or was, written.

    Raises StateError while a bad or deleted one still has the directory: prune, remove, forget first.
    """
    now = db.now_us()

    def insert(connection: sqlite3.Connection) -> Checkpoint:
        row = connection.execute("SELECT id, state FROM checkpoint WHERE dir = ?", (directory,)).fetchone()
        if row is not None:
            if row["state"] in {CheckpointState.BAD, CheckpointState.DELETING}:
                raise StateError(f"checkpoint {row['id']} ({row['state']}) still has {directory}: remove it first")
            return _fetch(connection, row["id"])
        state = lifecycle.INITIAL[CheckpointState]
        values = {"job_id": job_id, "version_id": version_id, "dir": directory, "state": state, "now": now}
        return _fetch(connection, connection.execute(_INSERT, values).fetchone()["id"])

    return await db.write(insert, urgent=True)


async def commit(db: Database, checkpoint_id: CheckpointId, manifest_sha: str, nbytes: int) -> Checkpoint:
    """Its files are durable under their final name; now it counts.

    Rule "checkpoint": files first, then the row, with an event. Guard: the manifest's hash; the same again is a
    duplicate. Raises StateError.
    """
    now = db.now_us()

    def finish(connection: sqlite3.Connection) -> Checkpoint:
        values = {**guard(CheckpointState, "commit"), "id": checkpoint_id}
        changed = connection.execute(_COMMIT, {**values, "manifest_sha": manifest_sha, "bytes": nbytes}).rowcount
        found = _find(connection, checkpoint_id)
        if changed == 0 and (found is None or (found.state, found.manifest_sha) != (values["to"], manifest_sha)):
            raise refused(connection, CheckpointState, checkpoint_id, "commit")
        checkpoint = _fetch(connection, checkpoint_id)
        if changed:
            body = {"version": checkpoint.step, "bytes": nbytes}
            events.insert(connection, _job_of(connection, checkpoint_id), "checkpoint", body, now)
        return checkpoint

    return await db.write(finish, urgent=True)


async def mark_bad(db: Database, checkpoint_id: CheckpointId, reason: str) -> None:
    """Its files do not verify: never load it again; an event says why. Guard: state. Raises StateError."""
    now = db.now_us()

    def reject(connection: sqlite3.Connection) -> None:
        values = {**guard(CheckpointState, "reject"), "id": checkpoint_id}
        if connection.execute(_MOVE, values).rowcount == 0:
            raise refused(connection, CheckpointState, checkpoint_id, "reject")
        checkpoint = _fetch(connection, checkpoint_id)
        body = {"version": checkpoint.step, "dir": checkpoint.dir, "reason": reason}
        events.insert(connection, _job_of(connection, checkpoint_id), "checkpoint_bad", body, now)

    await db.write(reject, urgent=True)


async def newest_valid(db: Database, job_id: JobId) -> tuple[Checkpoint, ...]:
    """Committed checkpoints of versions that are not lost, newest first: the order in which to try them."""
    return await db.read(lambda connection: _valid(connection, job_id))


async def prune(db: Database, job_id: JobId, keep: int) -> tuple[Checkpoint, ...]:
    """What is to be deleted, now in state `deleting`: all but the newest `keep` valid ones.

    Bad ones, those of lost versions and unfinished ones of older epochs go too. The caller removes each directory,
    then calls `forget`: deletion in the opposite order of writing. Re-runnable: rows left in `deleting` come again.
    """

    def mark(connection: sqlite3.Connection) -> tuple[Checkpoint, ...]:
        kept = {checkpoint.id for checkpoint in _valid(connection, job_id)[:keep]}
        for checkpoint in _all(connection, job_id):
            if checkpoint.state in {CheckpointState.COMMITTED, CheckpointState.BAD} and checkpoint.id not in kept:
                connection.execute(_MOVE, {**guard(CheckpointState, "delete"), "id": checkpoint.id})
        return tuple(c for c in _all(connection, job_id) if c.state is CheckpointState.DELETING)

    return await db.write(mark)


async def forget(db: Database, checkpoint_id: CheckpointId) -> None:
    """Its directory is gone. Guard: state; forgetting twice is forgetting once. Raises StateError for a live one."""

    def delete(connection: sqlite3.Connection) -> None:
        found = _find(connection, checkpoint_id)
        if found is not None and found.state is not CheckpointState.DELETING:
            raise StateError(f"checkpoint {checkpoint_id} is {found.state}, not deleting: prune it first")
        connection.execute("DELETE FROM checkpoint WHERE id = ?", (checkpoint_id,))

    await db.write(delete)


async def collect_rollouts(db: Database, job_id: JobId, keep: int) -> int:
    """Delete what no replay needs any more; how many groups lost their rollouts (the groups' own rows stay).

    Those are consumed groups whose step the oldest of the newest `keep` valid checkpoints covers, and dropped ones of
    that time. Until there are `keep`, the start model counts as version 0's, and nothing goes. Re-runnable: each
    slice is a transaction.
    """
    total = 0
    while count := await db.write(lambda connection: _collect(connection, job_id, keep)):
        total += count
    return total


def _collect(connection: sqlite3.Connection, job_id: JobId, keep: int) -> int:
    valid = _valid(connection, job_id)
    if keep < 1 or len(valid) < keep:
        return 0
    values = {"job_id": job_id, "horizon": valid[keep - 1].step, "limit": SLICE}
    rows = connection.execute(_COLLECTABLE, values).fetchall()
    for row in rows:
        of_group = {"grp_id": row["id"], "job_id": job_id}
        for statement in (_COUNT_TOKENS, _DELETE_CHUNKS, _DELETE_USES):
            connection.execute(statement, of_group)
        connection.execute("DELETE FROM rollout WHERE grp_id = ?", (row["id"],))
    return len(rows)


def _all(connection: sqlite3.Connection, job_id: JobId) -> Sequence[Checkpoint]:
    return [_checkpoint(row) for row in connection.execute(_ALL, {"job_id": job_id})]


def _valid(connection: sqlite3.Connection, job_id: JobId) -> tuple[Checkpoint, ...]:
    return tuple(_checkpoint(row) for row in connection.execute(_VALID, {"job_id": job_id}))


def _find(connection: sqlite3.Connection, checkpoint_id: CheckpointId) -> Checkpoint | None:
    sql = "SELECT c.*, step FROM checkpoint AS c JOIN policy_version AS v ON v.id = c.version_id WHERE c.id = ?"
    row = connection.execute(sql, (checkpoint_id,)).fetchone()
    return None if row is None else _checkpoint(row)


def _fetch(connection: sqlite3.Connection, checkpoint_id: CheckpointId) -> Checkpoint:
    found = _find(connection, checkpoint_id)
    if found is None:
        raise StateError(f"no checkpoint {checkpoint_id}")
    return found


def _job_of(connection: sqlite3.Connection, checkpoint_id: CheckpointId) -> int:
    return connection.execute("SELECT job_id FROM checkpoint WHERE id = ?", (checkpoint_id,)).fetchone()[0]


def _checkpoint(row: sqlite3.Row) -> Checkpoint:
    return Checkpoint(
        id=CheckpointId(row["id"]),
        version_id=VersionId(row["version_id"]),
        step=VersionStep(row["step"]),
        dir=row["dir"],
        manifest_sha=row["manifest_sha"],
        nbytes=row["bytes"],
        state=CheckpointState(row["state"]),
    )
