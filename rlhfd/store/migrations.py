"""From an empty or an older file to this schema, in one transaction, after a backup.

`MIGRATIONS[v]` leads from schema v to v + 1; schema 1 is the first. Statement by statement inside one BEGIN IMMEDIATE,
with `user_version` inside it (sqlite3's executescript would commit silently in between). Before anything is opened for
writing the file is looked at: one of a newer rlhfd, or not rlhfd's, stays byte for byte as it is.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from rlhfd.errors import StateError, StorageError
from rlhfd.store.backup import copy_to, sync_directory
from rlhfd.store.connection import translated, uri

APPLICATION_ID = 0x524C4846  # "RLHF"
PAGE_SIZE = 4096
MAGIC = b"SQLite format 3\x00"

MIGRATIONS: tuple[str, ...] = (files("rlhfd.store").joinpath("schema.sql").read_text(encoding="utf-8"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What a file says of itself. `blank`: no table has ever been made in it."""

    application_id: int
    user_version: int
    blank: bool


def prepare(path: Path, now_us: int, migrations: Sequence[str] = MIGRATIONS) -> None:
    """Bring the file at `path` to the newest schema, creating it (mode 0600) if need be.

    Raises StateError for a foreign, newer or damaged file, DiskFullError, StorageError.
    """
    try:
        version = _version(path, len(migrations))
        if version == len(migrations):
            return
        path.touch(mode=0o600, exist_ok=True)
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            if version > 0:
                _back_up(connection, path, version, now_us)
            _migrate(connection, migrations[version:], len(migrations))
        sync_directory(path.parent)
    except sqlite3.Error as error:
        raise translated(error, f"opening {path}") from error
    except OSError as error:
        raise StorageError(f"{path} can't be used ({error.strerror}): check owner, mode and room") from error


def _version(path: Path, newest: int) -> int:
    """The schema that the file has; 0 for none yet. Raises StateError for a file that must be left alone."""
    identity = identify(path)
    if identity is None or identity.blank:
        return 0
    if identity.application_id != APPLICATION_ID:
        raise StateError(f"{path} is not rlhfd's database: move it away or choose another state directory")
    if identity.user_version > newest:
        raise StateError(f"{path} has schema {identity.user_version}, this rlhfd knows {newest}: install a newer rlhfd")
    return identity.user_version


def identify(path: Path) -> Identity | None:
    """Read, without writing a byte, what the file is; None when there is none. Raises StateError for no database."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    with path.open("rb") as file:
        header = file.read(100)
    if len(header) < len(MAGIC) or not header.startswith(MAGIC):
        raise StateError(f"{path} is not a database: move it away or restore a backup")
    wal = path.with_name(path.name + "-wal")
    if wal.exists() and wal.stat().st_size > 0:  # the newest header may lie in it
        return _ask(path)
    return Identity(application_id=_int(header, 68), user_version=_int(header, 60), blank=_int(header, 40) == 0)


def _int(header: bytes, offset: int) -> int:
    """A field of the header: https://www.sqlite.org/fileformat2.html#the_database_header."""
    return int.from_bytes(header[offset : offset + 4], "big")


def _ask(path: Path) -> Identity:
    with closing(sqlite3.connect(uri(path, readonly=True), uri=True)) as connection:
        return Identity(
            application_id=connection.execute("PRAGMA application_id").fetchone()[0],
            user_version=connection.execute("PRAGMA user_version").fetchone()[0],
            blank=connection.execute("PRAGMA schema_version").fetchone()[0] == 0,
        )


def _back_up(connection: sqlite3.Connection, path: Path, version: int, now_us: int) -> None:
    directory = path.parent / "backups"
    directory.mkdir(mode=0o700, exist_ok=True)
    copy_to(connection, directory / f"{path.stem}-schema-{version}-{now_us}.db")


def _migrate(connection: sqlite3.Connection, scripts: Sequence[str], newest: int) -> None:
    connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
    for script in scripts:
        for statement in statements(script):
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {newest}")
    _check(connection)
    connection.execute("COMMIT")


def _check(connection: sqlite3.Connection) -> None:
    broken = connection.execute("PRAGMA foreign_key_check").fetchall()
    if broken:
        raise StateError(f"the migrated database breaks {len(broken)} references: it is left as it was")


def statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one; SQLite itself says at which semicolon one ends."""
    *pieces, rest = script.split(";")
    statement = ""
    for piece in pieces:
        statement += piece + ";"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    rest = "".join(line for line in (statement + rest).splitlines() if not line.lstrip().startswith("--")).strip()
    if rest:
        raise ValueError(f"a migration ends in the middle of a statement: {rest[:60]!r}")
