"""Events: what a person may want to know, in order; `wait_newer` is how a follower waits for the next one."""

import asyncio
import sqlite3
from collections.abc import Mapping
from typing import Any

import msgspec

from rlhfd.core.types import Epoch, Event, JobId
from rlhfd.store.db import Database
from rlhfd.store.moves import json_text
from rlhfd.store.queries import query

_INSERT = query("insert_event")
LIMIT = 1000  # events in one answer


def insert(
    connection: sqlite3.Connection, job_id: int | None, kind: str, body: Mapping[str, Any], now_us: int
) -> Event:
    """Add an event inside a transaction of the caller's: it is there exactly if what it tells of is."""
    parameters = {"job_id": job_id, "us": now_us, "kind": kind, "body": json_text(dict(body))}
    return _event(connection.execute(_INSERT, parameters).fetchone())


async def add(db: Database, job_id: JobId | None, kind: str, body: Mapping[str, Any]) -> Event:
    """Add an event of its own. No guard: told twice, it happened twice."""
    now = db.now_us()
    return await db.write(lambda connection: insert(connection, job_id, kind, body, now))


async def after(db: Database, job_id: JobId | None, event_id: int, limit: int = LIMIT) -> tuple[Event, ...]:
    """Events with a higher id, oldest first; of one job, or with None of everything."""

    def events(connection: sqlite3.Connection) -> tuple[Event, ...]:
        where, values = ("job_id = ? AND", (job_id,)) if job_id is not None else ("", ())
        sql = f"SELECT * FROM event WHERE {where} id > ? ORDER BY id LIMIT ?"  # noqa: S608
        return tuple(_event(row) for row in connection.execute(sql, (*values, event_id, limit)))

    return await db.read(events)


async def newest(db: Database, job_id: JobId) -> int:
    """The id of a job's newest event, 0 when it has none: where a follower starts."""
    sql = "SELECT coalesce(max(id), 0) FROM event WHERE job_id = ?"
    return await db.read(lambda connection: connection.execute(sql, (job_id,)).fetchone()[0])


async def wait_newer(db: Database, job_id: JobId | None, event_id: int, timeout: float) -> tuple[Event, ...]:  # noqa: ASYNC109
    """Events with a higher id, as soon as there are any; none after `timeout` seconds."""
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        news = db.news()
        found = await after(db, job_id, event_id)
        left = deadline - asyncio.get_running_loop().time()
        if found or left <= 0:
            return found
        try:
            await asyncio.wait_for(news.wait(), left)
        except TimeoutError:
            return ()


def _event(row: sqlite3.Row) -> Event:
    return Event(
        id=row["id"],
        job_id=None if row["job_id"] is None else JobId(row["job_id"]),
        epoch=Epoch(row["epoch"]),
        us=row["us"],
        kind=row["kind"],
        body=msgspec.json.decode(row["body"]),
    )
