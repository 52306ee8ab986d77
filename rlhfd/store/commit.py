"""Group commit, the half that runs on the writer's thread: many transactions, one BEGIN and one COMMIT.

Each function runs under a savepoint of its own, so one that raises takes back its own rows and no others. What is
uncertain is never called done: a function has succeeded only when the COMMIT has.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rlhfd.errors import RlhfdError, StateError, StorageError
from rlhfd.store.connection import translated


@dataclass(slots=True, eq=False)
class Unit:
    """One transaction on its way: the function, who waits for it (from when, loop time), and what came of it."""

    fn: Callable[[sqlite3.Connection], Any]
    name: str
    since: float
    waiter: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """`broken`: the disk failed, nothing may be written after it. `last_event`: newest event id, 0 when none."""

    broken: StorageError | None = None
    last_event: int = 0


@dataclass(slots=True)
class _Savepoint:
    """Runs one unit alone among its neighbours; keeps its error instead of raising it.

    Not an `except Exception`, though it catches as much: whatever a function raises belongs to its caller.
    """

    connection: sqlite3.Connection
    unit: Unit
    name: str = field(default="unit", init=False)

    def __enter__(self) -> None:
        self.connection.execute(f"SAVEPOINT {self.name}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self.unit.error = _told(error, self.unit.name)
        if self.connection.in_transaction:
            if error is not None:
                self.connection.execute(f"ROLLBACK TO {self.name}")
            self.connection.execute(f"RELEASE {self.name}")
        return True


def commit_together(connection: sqlite3.Connection, units: Sequence[Unit], epoch: int | None) -> Outcome:
    """Run the units in order and commit them at once; each ends with a result or an error.

    `epoch`: the one this process owns; where the file has another, a newer daemon owns it and nothing is written.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        _fence(connection, epoch)
        for unit in units:
            _run(connection, unit)
        connection.execute("COMMIT")
        return Outcome(last_event=_last_event(connection))
    except (sqlite3.Error, RlhfdError) as error:
        told = _told(error, f"committing {len(units)} transactions ({units[0].name} …)")
        for unit in units:
            unit.error = unit.error or told
        return Outcome(broken=_fatal(told)) if _fatal(told) else _undone(connection)


def _run(connection: sqlite3.Connection, unit: Unit) -> None:
    with _Savepoint(connection, unit):
        unit.result = unit.fn(connection)
    if unit.error is not None and _fatal(unit.error):
        raise unit.error
    if not connection.in_transaction:  # SQLite rolls everything back when it runs out of room: the neighbours too
        raise unit.error if isinstance(unit.error, RlhfdError) else StorageError(f"{unit.name} ended the transaction")


def _fence(connection: sqlite3.Connection, epoch: int | None) -> None:
    """Invariant 8: an old epoch writes nothing. The write lock is held, so the answer stays true until COMMIT."""
    if epoch is None:
        return
    row = connection.execute("SELECT epoch FROM daemon").fetchone()
    if row is None or row[0] != epoch:
        found = "none" if row is None else row[0]
        raise StateError(f"fenced: the database belongs to epoch {found}, this daemon is epoch {epoch}; it must end")


def _told(error: BaseException, doing: str) -> BaseException:
    if not isinstance(error, sqlite3.Error):
        return error
    told = translated(error, doing)
    if told is not error:
        told.__cause__ = error
    return told


def _fatal(error: BaseException) -> StorageError | None:
    return error if isinstance(error, StorageError) and not error.retryable else None


def _undone(connection: sqlite3.Connection) -> Outcome:
    if connection.in_transaction:
        connection.execute("ROLLBACK")
    return Outcome(last_event=_last_event(connection))


def _last_event(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'event'").fetchone()
    return 0 if row is None else row[0]
