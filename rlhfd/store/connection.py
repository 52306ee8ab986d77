"""One SQLite connection and the thread it lives on; what every connection of this store is set to.

The only module that opens the database for the running daemon: one writer (pragmas below), and readers with `mode=ro`.
"""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, cast

import aiosqlite

from rlhfd.errors import DiskFullError, RlhfdError, StateError, StorageError

T = TypeVar("T")

BUSY_SECONDS = 5.0
WRITER_PRAGMAS = (
    "PRAGMA synchronous = FULL",  # NORMAL loses acked rows in a power cut
    "PRAGMA foreign_keys = ON",
    "PRAGMA trusted_schema = OFF",
    "PRAGMA cell_size_check = ON",  # a damaged page is reported, not followed
    "PRAGMA temp_store = MEMORY",  # a full /tmp must not fail a write
    "PRAGMA journal_size_limit = 67108864",  # bytes; a burst does not leave a huge WAL behind
)


class Link:
    """A connection on its own thread: `run` executes one function there at a time, in the order of the calls."""

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, path: Path, *, readonly: bool) -> "Link":
        """Connect. Raises StorageError where the file can't be opened or can't be put into WAL mode."""
        connection = aiosqlite.connect(
            uri(path, readonly=readonly), uri=True, isolation_level=None, timeout=BUSY_SECONDS
        )
        # Private: a connection that nobody closed would keep the interpreter from exiting, and a service manager
        # would wait for ever to restart it. (Before aiosqlite 0.22 the connection is itself the thread.)
        cast("Thread", getattr(connection, "_thread", connection)).daemon = True
        link = cls(connection)
        try:
            async with AsyncExitStack() as opened:
                opened.push_async_callback(link.close)
                await connection
                await link.run(_set_reader if readonly else _set_writer)
                opened.pop_all()
        except sqlite3.Error as error:
            raise translated(error, f"opening {path}") from error
        return link

    async def run(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """The result of `fn` on the connection's thread; sqlite3 errors come out as they are."""
        # Private: aiosqlite's public calls are one statement each, and a transaction has to be one function, so that
        # no other task's statement and no cancellation can come between its statements.
        execute = cast(
            "Callable[[Callable[[sqlite3.Connection], T], sqlite3.Connection], Awaitable[T]]",
            self._connection._execute,  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
        )
        return await execute(fn, cast("Any", self._connection)._conn)  # noqa: SLF001

    async def close(self) -> None:
        """Finish what is queued, close, end the thread; also when the caller is cancelled meanwhile."""
        await asyncio.shield(asyncio.ensure_future(self._connection.close()))


def _set_reader(connection: sqlite3.Connection) -> None:
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA trusted_schema = OFF")


def _set_writer(connection: sqlite3.Connection) -> None:
    connection.row_factory = sqlite3.Row
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise StorageError(f"SQLite refuses WAL mode (it stays in {mode}): put the state directory on a local disk")
    for pragma in WRITER_PRAGMAS:
        connection.execute(pragma)


def uri(path: Path, *, readonly: bool) -> str:
    """The file's name for SQLite, whatever characters are in it. Never creates the file."""
    return f"{path.absolute().as_uri()}?mode={'ro' if readonly else 'rw'}"


_BUSY = "another process holds the database while {doing} ({error}): only the daemon opens it"
_CLOSED = "the database can't be used while {doing} ({error}): check owner, mode and mount"
_DAMAGED = "the database is damaged ({error}, while {doing}): restore a backup"
_MEANINGS: dict[int, tuple[type[RlhfdError], str]] = {
    sqlite3.SQLITE_FULL: (DiskFullError, "no room left while {doing}: nothing was written; free some space"),
    sqlite3.SQLITE_IOERR: (
        StorageError,
        "the disk failed while {doing} ({error}): the outcome is unknown; restart the daemon",
    ),
    sqlite3.SQLITE_BUSY: (StorageError, _BUSY),
    sqlite3.SQLITE_LOCKED: (StorageError, _BUSY),
    sqlite3.SQLITE_READONLY: (StorageError, _CLOSED),
    sqlite3.SQLITE_CANTOPEN: (StorageError, _CLOSED),
    sqlite3.SQLITE_PERM: (StorageError, _CLOSED),
    sqlite3.SQLITE_CORRUPT: (StateError, _DAMAGED),
    sqlite3.SQLITE_NOTADB: (StateError, _DAMAGED),
    sqlite3.SQLITE_CONSTRAINT: (StateError, "the schema refuses {doing}: {error}"),
}


def translated(error: sqlite3.Error, doing: str) -> RlhfdError | sqlite3.Error:
    """What a SQLite error means here; one that means a bug in a statement is returned as it is."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code not in _MEANINGS:
        return error
    meaning, sentence = _MEANINGS[code]
    return meaning(sentence.format(doing=doing, error=error))
