"""A copy of the database while it is in use: complete and durable under its name, or not there at all."""

import os
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

from rlhfd.store.connection import Link, translated


async def backup(source: Path, target: Path) -> int:
    """Copy the live database at `source` to `target`, replacing it; the copy's size in bytes.

    One snapshot, on a reader of its own: writers go on meanwhile. Raises DiskFullError, StorageError.
    """
    link = await Link.open(source, readonly=True)
    try:
        return await link.run(partial(copy_to, target=target))
    finally:
        await link.close()


def copy_to(connection: sqlite3.Connection, target: Path) -> int:
    """Copy what `connection` has committed: temporary name, fsync, rename, fsync of the directory. Size in bytes."""
    unfinished = target.with_name(target.name + ".tmp")
    unfinished.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(unfinished, isolation_level=None)) as copy:
            connection.backup(copy)
        _sync(unfinished)
        unfinished.rename(target)
    except sqlite3.Error as error:
        raise translated(error, f"writing the backup {target}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    sync_directory(target.parent)
    return target.stat().st_size


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
