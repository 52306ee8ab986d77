"""Epochs of the daemon: who owns the database, and what a new owner finds."""

import sqlite3

from rlhfd.core.types import CheckpointState, Epoch, RolloutState
from rlhfd.store.db import Database
from rlhfd.store.events import insert
from rlhfd.store.moves import guard
from rlhfd.store.queries import query

_BEGIN = query("begin_epoch")
_PARK = query("park_rollouts")
_ABANDON = query("abandon_checkpoints")
_FORGIVE = query("forgive_attempts")


async def begin_epoch(db: Database, *, pid: int, boot_id: str, version: str) -> Epoch:
    """Own the database and recover its tables; from here on older epochs are fenced (invariant 8).

    Rule "recover", one transaction: epoch + 1, generating rollouts become partial, unfinished checkpoints are to be
    deleted, an event. Running jobs stay running until they are claimed (attempt + 1), recorded steps stay for replay.
    After a clean exit the attempts of running jobs do not count as failed ones. Guard: re-runnable, since a crash
    before the COMMIT leaves everything as it was, and after it the same is found again.
    """
    now = db.now_us()

    def recover(connection: sqlite3.Connection) -> Epoch:
        clean = _was_clean(connection)
        row = connection.execute(_BEGIN, {"pid": pid, "boot_id": boot_id, "version": version, "now": now}).fetchone()
        parked = connection.execute(_PARK, guard(RolloutState, "release")).rowcount
        abandoned = connection.execute(_ABANDON, guard(CheckpointState, "delete")).rowcount
        if clean:
            connection.execute(_FORGIVE)
        body = {"pid": pid, "version": version, "clean": clean, "partials": parked, "unfinished_checkpoints": abandoned}
        insert(connection, None, "daemon_started", body, now)
        return Epoch(row["epoch"])

    db.epoch = await db.write(recover, vital=True)
    return db.epoch


async def mark_clean_exit(db: Database) -> None:
    """The last write of a daemon that drained. Guard: the epoch, checked in every transaction."""
    now = db.now_us()

    def leave(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE daemon SET clean_exit = 1")
        insert(connection, None, "daemon_stopped", {}, now)

    await db.write(leave, vital=True)


def _was_clean(connection: sqlite3.Connection) -> bool:
    row = connection.execute("SELECT clean_exit FROM daemon").fetchone()
    return row is None or bool(row["clean_exit"])
