"""The database: one writer, a few readers, transactions that are functions.

    write(fn) ─► pending ─► writer task ─► one thread: BEGIN, fn, fn, fn …, COMMIT ─► every caller's future
    read(fn)  ─► a reader's thread: BEGIN, fn, END

*Consumes* functions of one connection; *produces* their results, after COMMIT; *waits for* the pace (below), then for
the disk; *unblocked by* a new function, an urgent one, a full batch, or closing.

Guarantees held here: invariant 1 (a future resolves only after its COMMIT, with synchronous=FULL) and 8 (every COMMIT
checked that the epoch in the file is ours). A cancelled caller does not cancel its transaction.

Decision: the window is a pace, not a pause. A commit costs one credit, credits come back one per WINDOW, a few can be
saved up. So a lone transaction commits at once, and only under load do the commits settle at one per WINDOW, which is
what keeps a thousand producers cheap.
"""

import asyncio
import contextlib
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from rlhfd.core.types import Epoch
from rlhfd.errors import DeadlineError, DiskFullError, StorageError
from rlhfd.store import migrations
from rlhfd.store.commit import Outcome, Unit, commit_together
from rlhfd.store.connection import Link, translated

T = TypeVar("T")

WINDOW = 0.020  # seconds between commits under load
BURST = 16  # commits that may follow each other at once
BATCH = 256  # functions in one commit
WRITE_SECONDS = 60.0  # a commit that takes longer: the disk hangs
READ_SECONDS = 30.0
READERS = 2


def wall_us() -> int:
    """The wall clock, µs UTC."""
    return time.time_ns() // 1000


class Pace:
    """A token bucket of commits; times are the loop's, seconds."""

    def __init__(self, now: float, *, window: float = WINDOW, burst: int = BURST) -> None:
        self._window, self._burst = window, float(burst)
        self._credit, self._at = float(burst), now

    def delay(self, now: float) -> float:
        """Seconds until the next commit is due; 0 while there is credit."""
        self._credit = min(self._burst, self._credit + (now - self._at) / self._window)
        self._at = now
        return max(0.0, (1.0 - self._credit) * self._window)

    def spend(self) -> None:
        """A commit has begun. An urgent one may overdraw, by one burst at most."""
        self._credit = max(-self._burst, self._credit - 1.0)


class Database:
    """`rlhfd.db`. Open with `async with await Database.open(path) as db`, or call `close` in a `finally`."""

    def __init__(self, path: Path, *, clock: Callable[[], int], pace: Pace, writer: Link, readers: list[Link]) -> None:
        self.path = path
        self.now_us = clock
        self.epoch: Epoch | None = None  # set by epochs.begin_epoch; from then on every COMMIT checks it
        self.use_reserve: Callable[[], bool] = lambda: False  # frees room that was kept back; False: there was none
        self._loop = asyncio.get_running_loop()
        self._writer, self._readers = writer, readers
        self._idle_readers: asyncio.Queue[Link] = asyncio.Queue()
        for reader in readers:
            self._idle_readers.put_nowait(reader)
        self._pending: deque[Unit] = deque()
        self._committing: list[Unit] = []
        self._arrived, self._due = asyncio.Event(), asyncio.Event()
        self._pace = pace
        self._closing = False
        self._broken: StorageError | None = None
        self._last_event, self._news = 0, asyncio.Event()
        self._task = asyncio.create_task(self._write_all(), name="store writer")

    @classmethod
    async def open(cls, path: Path, *, clock: Callable[[], int] = wall_us, window: float = WINDOW) -> Self:
        """Create or migrate, then open. `window`: seconds between commits under load.

        Raises StateError for a file that is damaged, of a newer rlhfd or not rlhfd's (it stays byte for byte as it
        is), DiskFullError, StorageError.
        """
        await asyncio.to_thread(migrations.prepare, path, clock())
        async with contextlib.AsyncExitStack() as opened:
            writer = await Link.open(path, readonly=False)
            opened.push_async_callback(writer.close)
            readers: list[Link] = []
            for _ in range(READERS):
                readers.append(await Link.open(path, readonly=True))
                opened.push_async_callback(readers[-1].close)
            pace = Pace(asyncio.get_running_loop().time(), window=window)
            database = cls(path, clock=clock, pace=pace, writer=writer, readers=readers)
            opened.pop_all()
            return database

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- writing ---------------------------------------------------------------------------------------------------

    async def write(self, fn: Callable[[sqlite3.Connection], T], *, urgent: bool = False, vital: bool = False) -> T:
        """Run `fn` as one transaction; its result, after COMMIT.

        `fn` runs on the writer's thread, under a savepoint among others: it must touch nothing but its connection,
        and raise to take back what it did. `urgent`: commit without regard to the pace. `vital`: urgent, and worth
        the reserve where the disk is full, as the pause of a job is. A cancelled caller leaves the transaction
        running. Raises what `fn` raises; DiskFullError (nothing was written); StorageError (the outcome is unknown:
        end the process, reconcile after a restart by the idempotency keys); StateError (fenced).
        """
        try:
            return await self._write(fn, urgent=urgent or vital)
        except DiskFullError:
            if not (vital and self.use_reserve()):
                raise
        return await self._write(fn, urgent=True)

    async def _write(self, fn: Callable[[sqlite3.Connection], T], *, urgent: bool) -> T:
        if self._closing or self._task.done():
            raise StorageError(f"the store is closed: {self.path}")
        if self._broken is not None:
            raise StorageError(f"the store stopped writing: {self._broken}") from self._broken
        unit = Unit(fn, _name(fn), self._loop.time(), self._loop.create_future())
        unit.waiter.add_done_callback(_retrieve)
        self._pending.append(unit)
        self._arrived.set()
        if urgent or len(self._pending) >= BATCH:
            self._due.set()
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                return await asyncio.shield(unit.waiter)
        except TimeoutError:
            if unit.waiter.done():
                raise
            message = f"the disk did not commit {unit.name} within {WRITE_SECONDS:g} s: the outcome is unknown"
            raise StorageError(message) from None

    def writer_age(self) -> float:
        """Seconds that the oldest transaction has been waiting for its COMMIT; 0 when none is (for the watchdog)."""
        oldest = next(iter(self._committing), None) or next(iter(self._pending), None)
        return 0.0 if oldest is None else self._loop.time() - oldest.since

    async def _write_all(self) -> None:
        try:
            while batch := await self._next_batch():
                self._committing = batch
                self._pace.spend()
                outcome = await self._writer.run(partial(commit_together, units=batch, epoch=self.epoch))
                self._settle(batch, outcome)
        finally:
            for unit in [*self._committing, *self._pending]:
                _resolve(unit, StorageError(f"the store's writer ended before {unit.name} was committed"))

    async def _next_batch(self) -> list[Unit]:
        """Up to BATCH units, at the pace; none once closing and drained."""
        while not self._pending:
            if self._closing:
                return []
            self._arrived.clear()
            await self._arrived.wait()
        delay = self._pace.delay(self._loop.time())
        if delay > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._due.wait()
        batch = [self._pending.popleft() for _ in range(min(BATCH, len(self._pending)))]
        if not (self._closing or len(self._pending) >= BATCH):
            self._due.clear()
        return batch

    def _settle(self, batch: list[Unit], outcome: Outcome) -> None:
        self._committing = []
        self._broken = self._broken or outcome.broken
        for unit in batch:
            _resolve(unit, unit.error)
        if outcome.last_event > self._last_event:
            self._last_event = outcome.last_event
            self._news.set()
            self._news = asyncio.Event()

    def news(self) -> asyncio.Event:
        """Set once, when the next event row is committed. Take it before looking at the table."""
        return self._news

    # --- reading ---------------------------------------------------------------------------------------------------

    async def read(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run `fn` on one snapshot of what is committed.

        Raises what `fn` raises, StorageError, StateError (damaged), DeadlineError.
        """
        if self._closing:
            raise StorageError(f"the store is closed: {self.path}")
        try:
            async with asyncio.timeout(READ_SECONDS):
                reader = await self._idle_readers.get()
                try:
                    return await reader.run(partial(_snapshot, fn))
                finally:
                    self._idle_readers.put_nowait(reader)
        except TimeoutError:
            raise DeadlineError(f"the store did not answer {_name(fn)} within {READ_SECONDS:g} s") from None
        except sqlite3.Error as error:
            raise translated(error, f"reading {_name(fn)}") from error

    # --- closing ---------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Commit what is pending, close every connection. Twice is once.

        The writer closes last and so folds the WAL into the file; after a disk failure it closes first, because the
        checkpoint that the last one to close does would trust an fsync that has failed before.
        """
        self._closing = True
        self._arrived.set()
        self._due.set()
        links, self._readers = [*self._readers, self._writer], []
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await asyncio.shield(asyncio.gather(self._task, return_exceptions=True))
        except TimeoutError:
            raise StorageError(f"the disk did not commit the last transactions in {WRITE_SECONDS:g} s") from None
        for link in reversed(links) if self._broken else links:
            await link.close()


def _snapshot(fn: Callable[[sqlite3.Connection], T], connection: sqlite3.Connection) -> T:
    connection.execute("BEGIN")
    try:
        return fn(connection)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _resolve(unit: Unit, error: BaseException | None) -> None:
    if unit.waiter.done():
        return
    if error is None:
        unit.waiter.set_result(unit.result)
    else:
        unit.waiter.set_exception(error)


def _retrieve(waiter: asyncio.Future[object]) -> None:
    """The error of a caller that was cancelled is nobody's: keep asyncio from reporting it as never retrieved."""
    if not waiter.cancelled():
        waiter.exception()


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", repr(fn)).replace(".<locals>", "").removesuffix(".<lambda>")
