"""Child processes that were started and are not yet known to be gone: what a new epoch sweeps."""

import sqlite3
from dataclasses import asdict, dataclass

from rlhfd.core.types import Epoch, JobId
from rlhfd.store.db import Database
from rlhfd.store.queries import query

_RECORD = query("record_child")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildRow:
    """A process by what can't be reused: pid, start time in clock ticks since boot, and the boot itself."""

    pid: int
    session_id: int
    started_ticks: int
    boot_id: str
    epoch: Epoch
    job_id: JobId | None
    role: str


async def record_child(db: Database, child: ChildRow) -> None:
    """Remember a child as soon as it runs. Guard: its key; recording it twice is recording it once."""
    parameters = asdict(child)

    def record(connection: sqlite3.Connection) -> None:
        connection.execute(_RECORD, parameters)

    await db.write(record, urgent=True)


async def forget_child(db: Database, child: ChildRow) -> None:
    """The child and its whole session are gone. Guard: deleting it twice is deleting it once."""
    key = (child.pid, child.started_ticks, child.boot_id)

    def forget(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM child WHERE pid = ? AND started_ticks = ? AND boot_id = ?", key)

    await db.write(forget)


async def stale_children(db: Database, boot_id: str) -> tuple[ChildRow, ...]:
    """Children of epochs before this one that may still live; those of an earlier boot can't, and are forgotten here.

    Before `begin_epoch` that is every child. Guard: re-runnable; a row stays until `forget_child`.
    """
    epoch = db.epoch

    def sweep(connection: sqlite3.Connection) -> tuple[ChildRow, ...]:
        connection.execute("DELETE FROM child WHERE boot_id <> ?", (boot_id,))
        sql = "SELECT * FROM child WHERE epoch < coalesce(?, epoch + 1) ORDER BY pid"
        return tuple(ChildRow(**dict(row)) for row in connection.execute(sql, (epoch,)))

    return await db.write(sweep, urgent=True)
