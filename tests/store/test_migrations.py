import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rlhfd.errors import DiskFullError, StateError, StorageError
from rlhfd.store import migrations
from rlhfd.store.backup import backup, copy_to
from rlhfd.store.db import Database
from rlhfd.testing.nothing_lost import assert_nothing_lost
from tests.store.story import Story, submitted

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("schema-*.db"))
NEXT = "ALTER TABLE job ADD COLUMN note TEXT; -- a comment; with a semicolon\nCREATE TABLE later (id INTEGER) STRICT;"
AHEAD = (*migrations.MIGRATIONS, NEXT)


def ask(path: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def only_wal_mode(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_a_new_file_gets_the_newest_schema_and_our_mark(path: Path):
    migrations.prepare(path, 0)
    assert ask(path, "PRAGMA application_id") == [(migrations.APPLICATION_ID,)]
    assert ask(path, "PRAGMA user_version") == [(len(migrations.MIGRATIONS),)]
    assert ask(path, "PRAGMA journal_mode") == [("wal",)]
    assert path.stat().st_mode & 0o777 == 0o600
    assert not (path.parent / "backups").exists()
    before = path.read_bytes()
    migrations.prepare(path, 0)
    assert path.read_bytes() == before


def test_an_older_file_is_backed_up_and_brought_forward(path: Path):
    shutil.copy(FIXTURES[0], path)
    jobs = ask(path, "SELECT id, name, state FROM job")
    migrations.prepare(path, 123, AHEAD)
    assert ask(path, "PRAGMA user_version") == [(2,)]
    assert ask(path, "SELECT id, name, state FROM job") == jobs
    assert ask(path, "SELECT note FROM job") == [(None,)] * len(jobs)
    assert ask(path, "SELECT count(*) FROM later") == [(0,)]
    (kept,) = (path.parent / "backups").iterdir()
    assert kept.name == "rlhfd-schema-1-123.db"
    assert ask(kept, "PRAGMA user_version") == [(1,)]
    assert ask(kept, "SELECT id, name, state FROM job") == jobs


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.stem)
async def test_every_schema_that_there_has_been_opens(path: Path, fixture: Path):
    shutil.copy(fixture, path)
    tables = {name for (name,) in ask(fixture, "SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert all(ask(fixture, f"SELECT count(*) FROM {table}")[0] > (0,) for table in tables)
    async with await Database.open(path) as db:
        await Story.start(db)
    assert_nothing_lost(path)


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.stem)
def test_a_schema_that_has_landed_is_never_edited(path: Path, fixture: Path):
    """A change is a new migration: files with the old schema are out there."""
    version = int(fixture.stem.removeprefix("schema-"))
    migrations.prepare(path, 0, migrations.MIGRATIONS[:version])
    schema = "SELECT name, sql FROM sqlite_master ORDER BY name"
    assert ask(path, schema) == ask(fixture, schema)


def test_a_migration_that_fails_leaves_the_file_as_it_was(path: Path):
    shutil.copy(FIXTURES[0], path)
    before = dump(path)
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        migrations.prepare(path, 0, (*AHEAD, "CREATE TABLE x (a INTEGER); DROP TABLE never_there;"))
    assert ask(path, "PRAGMA user_version") == [(1,)]
    assert dump(path) == before
    migrations.prepare(path, 1, AHEAD)
    assert ask(path, "PRAGMA user_version") == [(2,)]


def test_a_migration_that_breaks_a_reference_is_refused(path: Path):
    shutil.copy(FIXTURES[0], path)
    with pytest.raises(StateError, match="breaks 1 references"):
        migrations.prepare(path, 0, (*AHEAD, "UPDATE job SET after_id = 99 WHERE id = 1;"))
    assert ask(path, "PRAGMA user_version") == [(1,)]


def test_a_file_of_a_newer_rlhfd_stays_byte_for_byte(path: Path):
    migrations.prepare(path, 0, AHEAD)
    before = content(path.parent)
    with pytest.raises(StateError, match="has schema 2, this rlhfd knows 1: install a newer rlhfd"):
        migrations.prepare(path, 0)
    assert content(path.parent) == before


async def test_a_newer_file_with_a_full_wal_stays_byte_for_byte(path: Path):
    """The newest header may lie in the WAL alone."""
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("CREATE TABLE t (a)")
        writer.execute(f"PRAGMA application_id = {migrations.APPLICATION_ID}")
        writer.execute("PRAGMA user_version = 9")
        copy = path.parent / "copy"
        copy.mkdir()
        for name in ("rlhfd.db", "rlhfd.db-wal"):
            shutil.copy(path.parent / name, copy / name)
    before = content(copy)
    with pytest.raises(StateError, match="has schema 9"):
        await Database.open(copy / "rlhfd.db")
    after = content(copy)
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("mark", [0, 1234])
async def test_a_foreign_database_stays_byte_for_byte(path: Path, mark: int):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine (a)")
        connection.execute(f"PRAGMA application_id = {mark}")
    before = content(path.parent)
    with pytest.raises(StateError, match="is not rlhfd's database"):
        await Database.open(path)
    assert content(path.parent) == before


@pytest.mark.parametrize("garbage", [b"not a database at all", b"SQLite format 2", b"\0" * 8192])
async def test_garbage_is_refused_and_stays(path: Path, garbage: bytes):
    path.write_bytes(garbage)
    with pytest.raises(StateError, match="is not a database"):
        await Database.open(path)
    assert content(path.parent) == {path.name: garbage}


async def test_a_damaged_file_is_told(path: Path):
    shutil.copy(FIXTURES[0], path)
    damaged = path.read_bytes()
    path.write_bytes(damaged[:4096] + b"\xff" * (len(damaged) - 4096))
    with pytest.raises(StateError, match="damaged"):
        async with await Database.open(path) as db:
            await submitted(db)


@pytest.mark.parametrize("half_made", [Path.touch, only_wal_mode])
async def test_a_file_whose_making_was_cut_short_is_made(path: Path, half_made: Callable[[Path], None]):
    half_made(path)
    async with await Database.open(path) as db:
        await submitted(db)


async def test_a_directory_that_is_not_there_is_told(tmp_path: Path):
    with pytest.raises(StorageError, match="check owner, mode and room"):
        await Database.open(tmp_path / "nowhere" / "rlhfd.db")


def test_half_a_statement_is_a_bug():
    with pytest.raises(ValueError, match="ends in the middle of a statement"):
        list(migrations.statements("CREATE TABLE a (x);\nCREATE TABLE"))
    assert not list(migrations.statements("-- only\n-- comments; nothing else\n"))


# --- backups


async def test_a_backup_is_a_whole_database(story: Story, tmp_path: Path):
    version = await story.learned_step()
    target = tmp_path / "copy.db"
    assert await backup(story.db.path, target) == target.stat().st_size
    await story.learned_step()
    assert_nothing_lost(target)
    assert ask(target, "SELECT max(step) FROM policy_version") == [(version.step,)]
    async with await Database.open(target) as db:
        await Story.start(db)


async def test_a_backup_that_fails_leaves_nothing_under_its_name(story: Story, tmp_path: Path):
    missing = tmp_path / "nowhere" / "copy.db"
    with pytest.raises(StorageError):
        await backup(story.db.path, missing)
    target = tmp_path / "copy.db"
    target.write_bytes(b"an older backup")

    class NoRoom(sqlite3.Connection):
        def backup(self, target: sqlite3.Connection, **_: object) -> None:
            target.execute("CREATE TABLE half (a)")
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

    with closing(sqlite3.connect(":memory:", factory=NoRoom)) as connection, pytest.raises(DiskFullError):
        copy_to(connection, target)
    assert target.read_bytes() == b"an older backup"
    assert not list(tmp_path.glob("*.tmp"))
