"""What a step leaves behind for people: its metrics and its samples."""

from typing import Any

import msgspec

from rlhfd.core.types import JobId
from rlhfd.store.db import Database
from rlhfd.store.queries import query

_METRICS = query("metrics")
_SAMPLES = query("samples")


async def metrics(db: Database, job_id: JobId, after: int = 0) -> list[dict[str, Any]]:
    """The metrics of applied steps with a higher number, in order, each with its `step`."""
    rows = await db.read(lambda c: c.execute(_METRICS, {"job_id": job_id, "after": after}).fetchall())
    return [{"step": row["n"], **msgspec.json.decode(row["metrics"])} for row in rows]


async def samples(db: Database, job_id: JobId, limit: int) -> list[dict[str, Any]]:
    """At most `limit` sample objects, those of the newest step first; they outlive their rollouts."""
    rows = await db.read(lambda c: c.execute(_SAMPLES, {"job_id": job_id, "limit": limit}).fetchall())
    return [msgspec.json.decode(row["body"]) for row in rows]
