import asyncio
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlhfd.errors import DiskFullError, StateError, StorageError, UsageError
from rlhfd.store import db as store
from rlhfd.store.commit import Unit, commit_together
from rlhfd.store.db import Database, Pace
from tests.store.story import begin, submitted


async def make_table(db: Database) -> None:
    await db.write(lambda c: c.execute("CREATE TABLE note (n INTEGER PRIMARY KEY, body BLOB) STRICT"))


def insert(n: int, size: int = 1):
    def write(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO note VALUES (?, zeroblob(?))", (n, size))
        return n

    return write


async def stored(db: Database) -> list[int]:
    return await db.read(lambda c: [row[0] for row in c.execute("SELECT n FROM note ORDER BY n")])


# --- what every connection is set to


async def test_the_writer_is_set_to_survive_a_power_cut(db: Database):
    names = ("journal_mode", "synchronous", "foreign_keys", "page_size", "trusted_schema", "busy_timeout")
    found = await db.write(lambda c: {name: c.execute(f"PRAGMA {name}").fetchone()[0] for name in names})
    assert found == dict(zip(names, ("wal", 2, 1, 4096, 0, 5000), strict=True))


async def test_a_reader_can_not_write(db: Database):
    with pytest.raises(StorageError, match="can't be used"):
        await db.read(lambda c: c.execute("DELETE FROM job"))


# --- transactions


async def test_what_a_caller_has_is_what_a_reader_sees(db: Database):
    await make_table(db)
    for n in range(20):
        assert await db.write(insert(n)) == n
        assert (await stored(db))[-1] == n


async def test_one_that_raises_takes_back_its_own_rows_and_no_others(db: Database):
    await make_table(db)

    def fail(connection: sqlite3.Connection) -> None:
        insert(50)(connection)
        raise UsageError("no")

    results = await asyncio.gather(
        *(db.write(insert(n)) for n in range(10)),
        db.write(fail),
        db.write(insert(3)),  # there already
        *(db.write(insert(n)) for n in range(20, 30)),
        return_exceptions=True,
    )
    assert [type(r) for r in results if not isinstance(r, int)] == [UsageError, StateError]
    assert await stored(db) == [*range(10), *range(20, 30)]


async def test_a_cancelled_caller_leaves_its_transaction_running(db: Database):
    await make_table(db)
    entered, leave = threading.Event(), threading.Event()

    def slow(connection: sqlite3.Connection) -> None:
        entered.set()
        assert leave.wait(10)
        insert(1)(connection)

    task = asyncio.create_task(db.write(slow))
    await asyncio.to_thread(entered.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    leave.set()
    assert await db.write(insert(2)) == 2
    assert await stored(db) == [1, 2]


async def test_the_error_of_a_cancelled_caller_is_nobodys(db: Database):
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def fail(_: sqlite3.Connection) -> None:
        raise UsageError("no")

    task = asyncio.create_task(db.write(fail))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await db.write(lambda c: c.execute("SELECT 1").fetchone())
    assert not reported


async def test_many_callers_share_few_commits(db: Database, monkeypatch: pytest.MonkeyPatch):
    await make_table(db)
    batches: list[int] = []

    def counted(connection: sqlite3.Connection, units: list[Unit], epoch: int | None):
        batches.append(len(units))
        return commit_together(connection, units, epoch)

    monkeypatch.setattr(store, "commit_together", counted)
    await asyncio.gather(*(db.write(insert(n)) for n in range(600)))
    assert sum(batches) == 600
    assert max(batches) <= store.BATCH
    assert len(batches) <= 10
    assert await stored(db) == list(range(600))


async def test_transactions_run_in_the_order_of_the_calls(db: Database):
    order: list[int] = []
    await asyncio.gather(*(db.write(lambda _, n=n: order.append(n)) for n in range(500)))
    assert order == list(range(500))


# --- the pace


def test_lone_commits_do_not_wait_and_a_load_settles_at_one_a_window():
    pace, now, begun = Pace(0.0, window=0.02, burst=4), 0.0, []
    for _ in range(10):
        now += pace.delay(now)
        begun.append(round(now, 6))
        pace.spend()
    assert begun == [0, 0, 0, 0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12]


def test_credit_comes_back_up_to_the_burst():
    pace = Pace(0.0, window=0.02, burst=2)
    for _ in range(2):
        pace.spend()
    assert pace.delay(0.0) == pytest.approx(0.02)
    assert pace.delay(100.0) == 0
    pace.spend()
    assert pace.delay(100.0) == 0
    pace.spend()
    assert pace.delay(100.0) == pytest.approx(0.02)


async def test_an_urgent_one_does_not_wait_for_the_window(path: Path):
    async with await Database.open(path, window=3600.0) as db:
        for _ in range(store.BURST):
            await db.write(lambda _: None)
        waiting = asyncio.create_task(db.write(lambda _: "with it"))
        assert await asyncio.wait_for(db.write(lambda _: "now", urgent=True), 30) == "now"
        assert await waiting == "with it"


async def test_a_full_batch_does_not_wait_for_the_window(path: Path):
    async with await Database.open(path, window=3600.0) as db:
        for _ in range(store.BURST):
            await db.write(lambda _: None)
        calls = (db.write(lambda _: None) for _ in range(store.BATCH))
        await asyncio.wait_for(asyncio.gather(*calls), 30)


# --- fencing


async def test_an_older_epoch_writes_nothing_any_more(path: Path):
    async with await Database.open(path) as old, await Database.open(path) as new:
        await begin(old)
        await make_table(old)
        await begin(new)
        with pytest.raises(StateError, match="fenced: the database belongs to epoch 2, this daemon is epoch 1"):
            await old.write(insert(1))
        await new.write(insert(2))
        assert await stored(new) == [2]


# --- a disk that is full, fails or hangs


async def test_a_full_disk_is_clean_and_work_goes_on_when_there_is_room(db: Database):
    await make_table(db)
    await db.write(insert(0))
    pages = await db.write(lambda c: c.execute("PRAGMA page_count").fetchone()[0])
    await db.write(lambda c: c.execute(f"PRAGMA max_page_count = {pages + 2}").fetchone())
    with pytest.raises(DiskFullError, match=r"no room left .* nothing was written"):
        await db.write(insert(1, size=100_000))
    assert await stored(db) == [0]
    await db.write(insert(2))  # what still fits is still written
    await db.write(lambda c: c.execute("PRAGMA max_page_count = 100000").fetchone())
    await db.write(insert(1, size=100_000))
    assert await stored(db) == [0, 1, 2]


async def test_what_is_vital_is_written_into_the_room_that_was_kept_back(db: Database):
    await make_table(db)
    pages = await db.write(lambda c: c.execute("PRAGMA page_count").fetchone()[0])
    await db.write(lambda c: c.execute(f"PRAGMA max_page_count = {pages + 2}").fetchone())
    used: list[bool] = []

    def use_reserve() -> bool:
        used.append(not used)
        return used[-1]

    def insert_big(n: int):
        def write(connection: sqlite3.Connection) -> int:
            if used == [True]:
                connection.execute("PRAGMA max_page_count = 100000").fetchone()
            return insert(n, size=100_000)(connection)

        return write

    with pytest.raises(DiskFullError):
        await db.write(insert_big(1), vital=True)  # no reserve by default
    db.use_reserve = use_reserve
    with pytest.raises(DiskFullError):
        await db.write(insert_big(1), urgent=True)  # the reserve is not for everyone
    assert used == []
    assert await db.write(insert_big(1), vital=True) == 1
    assert await stored(db) == [1]


async def test_neighbours_of_one_that_fills_the_disk_are_stored_or_told(db: Database):
    await make_table(db)
    pages = await db.write(lambda c: c.execute("PRAGMA page_count").fetchone()[0])
    await db.write(lambda c: c.execute(f"PRAGMA max_page_count = {pages + 2}").fetchone())
    results = await asyncio.gather(
        *(db.write(insert(n, size=200_000 if n == 5 else 1)) for n in range(10)), return_exceptions=True
    )
    assert isinstance(results[5], DiskFullError)
    assert all(isinstance(r, int | DiskFullError) for r in results)
    assert await stored(db) == [r for r in results if isinstance(r, int)]


class FailingConnection(sqlite3.Connection):
    """COMMIT fails as it does when the disk does."""

    code = sqlite3.SQLITE_IOERR_FSYNC
    text = "disk I/O error"
    commits = 0

    def execute(self, sql: str, *parameters: object):  # pyright: ignore[reportIncompatibleMethodOverride]
        if sql == "COMMIT":
            self.commits += 1
            error = sqlite3.OperationalError(self.text)
            error.sqlite_errorcode = self.code
            raise error
        return super().execute(sql, *parameters)


def failing(code: int) -> FailingConnection:
    connection = sqlite3.connect(":memory:", isolation_level=None, factory=FailingConnection)
    connection.row_factory = sqlite3.Row
    connection.code = code
    connection.execute("CREATE TABLE note (n INTEGER PRIMARY KEY AUTOINCREMENT)")
    return connection


def unit(loop: asyncio.AbstractEventLoop, fn=lambda c: c.execute("INSERT INTO note DEFAULT VALUES")) -> Unit:
    return Unit(fn, "insert", 0.0, loop.create_future())


async def test_a_commit_that_fails_on_the_disk_is_unknown_and_never_tried_again():
    connection = failing(sqlite3.SQLITE_IOERR_FSYNC)
    units = [unit(asyncio.get_running_loop()) for _ in range(3)]
    outcome = commit_together(connection, units, None)
    assert isinstance(outcome.broken, StorageError)
    assert not outcome.broken.retryable
    assert all(isinstance(u.error, StorageError) and "unknown" in str(u.error) for u in units)
    assert connection.commits == 1
    connection.close()


async def test_a_commit_that_finds_no_room_is_rolled_back():
    connection = failing(sqlite3.SQLITE_FULL)
    units = [unit(asyncio.get_running_loop()) for _ in range(3)]
    outcome = commit_together(connection, units, None)
    assert outcome.broken is None
    assert all(isinstance(u.error, DiskFullError) for u in units)
    assert not connection.in_transaction
    assert connection.execute("SELECT count(*) FROM note").fetchone()[0] == 0
    connection.close()


async def broken(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next commit's fsync fails."""

    def fail(connection: sqlite3.Connection, units: list[Unit], epoch: int | None):
        failed = StorageError("the disk failed while committing: the outcome is unknown")
        for one in units:
            one.error = failed
        return store.Outcome(broken=failed)

    monkeypatch.setattr(store, "commit_together", fail)
    with pytest.raises(StorageError):
        await db.write(insert(9))
    monkeypatch.undo()


async def test_after_a_disk_failure_nothing_is_written_but_reading_goes_on(
    db: Database, monkeypatch: pytest.MonkeyPatch
):
    await make_table(db)
    await db.write(insert(1))
    await broken(db, monkeypatch)
    with pytest.raises(StorageError, match="stopped writing: the disk failed"):
        await db.write(insert(2))
    assert await stored(db) == [1]


@pytest.mark.parametrize("fails", [False, True])
async def test_only_a_healthy_store_folds_its_wal_into_the_file_when_it_closes(
    path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    async with await Database.open(path) as db:
        await make_table(db)
        await db.write(insert(1))
        await stored(db)
        if fails:
            await broken(db, monkeypatch)
    wal = path.with_name(path.name + "-wal")
    assert (wal.exists() and wal.stat().st_size > 0) is fails


async def test_the_age_of_the_oldest_waiting_transaction_tells_that_the_disk_hangs(db: Database):
    entered, leave = threading.Event(), threading.Event()
    assert db.writer_age() == 0
    hanging = asyncio.create_task(db.write(lambda _: entered.set() or leave.wait(10)))
    await asyncio.to_thread(entered.wait, 10)
    behind = asyncio.create_task(db.write(lambda _: None))
    await asyncio.sleep(0)
    first = db.writer_age()
    assert 0 < first < db.writer_age()
    leave.set()
    await asyncio.gather(hanging, behind)
    assert db.writer_age() == 0


async def test_a_write_that_never_ends_says_that_its_outcome_is_unknown(db: Database, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "WRITE_SECONDS", 0.01)
    leave = threading.Event()
    with pytest.raises(StorageError, match=r"did not commit test_a_write\S+ within 0.01 s: the outcome is unknown"):
        await db.write(lambda _: leave.wait(10))
    leave.set()


# --- closing


async def test_closing_commits_what_is_pending(path: Path):
    db = await Database.open(path, window=3600.0)
    await make_table(db)
    for n in range(1, store.BURST):
        await db.write(insert(n))
    waiting = [asyncio.create_task(db.write(insert(n))) for n in range(100, 400)]
    await asyncio.sleep(0)
    await db.close()
    await db.close()
    assert [await task for task in waiting] == list(range(100, 400))
    with pytest.raises(StorageError, match="closed"):
        await db.write(insert(1000))
    with pytest.raises(StorageError, match="closed"):
        await stored(db)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM note").fetchone()[0] == 300 + store.BURST - 1
    connection.close()


def test_a_store_that_nobody_closed_does_not_keep_the_interpreter(path: Path):
    script = (
        "import asyncio, sys, pathlib\n"
        "from rlhfd.store.db import Database\n"
        "async def main():\n"
        "    global kept\n"
        "    kept = await Database.open(pathlib.Path(sys.argv[1]))\n"
        "    raise SystemExit(7)\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(path)], timeout=60, check=False, capture_output=True)
    assert ended.returncode == 7


async def test_a_job_is_there_after_reopening(path: Path):
    async with await Database.open(path) as db:
        job = await submitted(db)
    async with await Database.open(path) as db:
        assert await submitted(db) == job
