"""The SQLite that Python is linked with, and whether it will do."""

import sqlite3
from dataclasses import dataclass

OLDEST = (3, 37, 0)  # STRICT tables; RETURNING is older


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """`usable`: new enough, thread-safe, with JSON functions."""

    version: str
    threadsafe: bool
    usable: bool


def sqlite_build() -> Build:
    """What `rlhfd doctor` and `rlhfd check` say about SQLite; opens no file."""
    threadsafe = sqlite3.threadsafety > 0
    usable = threadsafe and sqlite3.sqlite_version_info >= OLDEST and _has_json()
    return Build(version=sqlite3.sqlite_version, threadsafe=threadsafe, usable=usable)


def _has_json() -> bool:
    connection = sqlite3.connect(":memory:")
    try:
        return connection.execute("SELECT value FROM json_each('[1]')").fetchone() == (1,)
    except sqlite3.OperationalError:
        return False
    finally:
        connection.close()
